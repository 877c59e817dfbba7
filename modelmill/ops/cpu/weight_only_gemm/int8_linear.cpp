// Weight-only int8 GEMM; and the dequantization and epilogue for many rows, where torch computes
//     the GEMM.
//
// Computes: out[M, N] = (x[M, K] · weight[N, K]ᵀ) · scale[N] + bias
// Dtypes: x and out float32, bfloat16 or float16; weights int8; float32 scales
// Layout: row-major
// Range: any M (from 17 rows on torch's product: of bfloat16 where it is faster, of every type
//     without AVX2)
// Technique: AVX-512 FMA, AVX512_BF16 dot products, software prefetch; AVX2 products of 16-bit
//     integers (block_floating_point.h), or FMA for float32
// Ops: int8_linear, decode
#include "gemm_16bit/gemm_large_m.h"
#include "weight_only_gemm/groupwise.h"
#include "common/ops.h"

// out[rows, n] = (x[rows, k] · weight[n, k]ᵀ) · scale[n] + bias: the integers become floats, or
// bfloat16 where the activations are, in registers.
extern "C" void int8_linear(void* out, const void* x, const int8_t* weight, const float* scale,
                            const void* bias, int64_t rows, int64_t k, int64_t n, int dtype) {
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const auto put_out =
            mill::store_with_bias(static_cast<T*>(out), static_cast<const T*>(bias), n,
                                  [=](mill::vf sums, int64_t, int64_t j, int c) {
                                      return mill::mul(sums, mill::take(scale + j, c));
                                  });
#if defined(MILL_AVX2)
        if constexpr (mill::kBlockFloatingPoint<T>) {
            thread_local mill::Scratch scratch;
            const auto input = mill::pack_rows(scratch, static_cast<const T*>(x), rows, k, 0);
            const auto no_grids = [](int64_t, int64_t) { return mill::WeightGrids{}; };
            mill::fixed_point_gemm<mill::kBlockRuns, false, mill::Int8Codes>(
                input, rows, reinterpret_cast<const uint8_t*>(weight), k,
                (k + mill::kRunColumns - 1) / mill::kRunColumns, n, no_grids, put_out);
        } else
#endif
            mill::multiply<mill::Int8DotTraits<T>>(static_cast<const T*>(x), weight, rows, k, n,
                                                   put_out);
    });
}

// Exact floating-point copies of `count` integers, for products large enough that a library's
// blocked kernel wins.
extern "C" void int8_dequant(void* out, const int8_t* weight, int64_t count, int dtype) {
    const mill::UseTorchThreads team(true);
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        mill::parallel_for(count, 16 << 10, count, [&](int64_t from, int64_t to) {
            T* target = static_cast<T*>(out) + from;
            mill::for_each_vector(to - from, [&](int64_t i, int c) {
                mill::put(target + i, mill::take(weight + from + i, c), c);
            });
        });
    });
}

// out[rows, n] = out · scale[n] + bias, in place: the end of a product with widened integers.
extern "C" void int8_epilogue(void* out, const float* scale, const void* bias, int64_t rows,
                              int64_t n, int dtype) {
    const mill::UseTorchThreads team(true);
    mill::by_dtype(dtype, [&](auto* type) {
        using T = std::remove_pointer_t<decltype(type)>;
        const T* added = static_cast<const T*>(bias);
        mill::parallel_for_rows(rows, n * 2 * sizeof(T), [&](int64_t from, int64_t to) {
            for (int64_t m = from; m < to; m++) {
                T* row = static_cast<T*>(out) + m * n;
                mill::for_each_vector(n, [&](int64_t j, int c) {
                    const mill::vf wide =
                        mill::mul(mill::take(row + j, c), mill::take(scale + j, c));
                    mill::put(row + j, added ? mill::add(wide, mill::take(added + j, c)) : wide, c);
                });
            }
        });
    });
}
