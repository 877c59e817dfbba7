// A CUDA driver (libcuda.so.1) that launches nothing and keeps the arguments of the last launch:
// for Triton's own launchers on a machine without a GPU. It answers as an H200 would where it is
// asked.
#include <stdint.h>
#include <string.h>

enum { MOST = 32 };
enum { DEVICE_WARP = 10, DEVICE_PROCESSORS = 16, DEVICE_SHARED = 97, FUNCTION_THREADS = 0 };

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned count;
} Config;

static struct {
    uint64_t launches, function, stream;
    uint32_t sizes[7], attributes;
    uint64_t words[MOST];
} last;
static int widths[MOST], words;

// Bytes of each parameter of the launches that follow.
void expect(const int* bytes, int count) {
    for (words = 0; words < count && words < MOST; ++words) widths[words] = bytes[words];
}
const void* last_launch(void) { return &last; }

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
    ++last.launches;
    last.function = (uint64_t)function, last.stream = (uint64_t)config->stream,
    last.attributes = config->count;
    memcpy(last.sizes, config->grid, 12), memcpy(last.sizes + 3, config->block, 12);
    last.sizes[6] = config->shared;
    memset(last.words, 0, sizeof last.words);
    for (int i = 0; i < words; ++i) memcpy(&last.words[i], parameters[i], widths[i]);
    return 0;
}
int cuPointerGetAttribute(void* to, int what, uint64_t pointer) {
    return memcpy(to, &pointer, 8), 0;
}
int cuDeviceGet(int* to, int number) { return *to = number, 0; }
int cuDeviceGetAttribute(int* to, int what, int device) {
    *to = what == DEVICE_SHARED       ? 232448
          : what == DEVICE_PROCESSORS ? 132
          : what == DEVICE_WARP       ? 32
                                      : 65536;
    return 0;
}
int cuFuncGetAttribute(int* to, int what, void* function) {
    return *to = what == FUNCTION_THREADS ? 1024 : 0, 0;
}
static void* another(void) {
    static uintptr_t handles = 0x1000;
    return (void*)(handles += 16);
}
int cuModuleLoadData(void** to, const void* image) { return *to = another(), 0; }
int cuModuleGetFunction(void** to, void* module, const char* name) { return *to = another(), 0; }
int cuCtxGetCurrent(void** to) { return *to = &last, 0; }
int cuDevicePrimaryCtxRetain(void** to, int device) { return *to = &last, 0; }
int cuGetErrorString(int code, const char** to) { return *to = "an error", 0; }
#define SILENT(name)                                                                               \
    int name(void) { return 0; }
SILENT(cuCtxSetCurrent)
SILENT(cuFuncSetCacheConfig)
SILENT(cuFuncSetAttribute)
SILENT(cuOccupancyMaxActiveClusters)
SILENT(cuCtxGetLimit)
SILENT(cuCtxSetLimit)
SILENT(cuTensorMapEncodeTiled)
