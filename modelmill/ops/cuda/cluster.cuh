// Clusters: blocks that run at the same time and read one another's shared memory; boxes of two dimensions, one of which
// the copy engine may bring to several blocks of a cluster at once ("multicast"); the widest products; early launch.
#pragma once
#include "hopper.cuh"

__device__ inline u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster meet. Of what they stored before, ``barriers_ready`` alone makes barriers seen.
__device__ inline void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Arrive at the same barrier of another block of the cluster, or of this one. What this thread stored is not thereby
// seen there, which would cost a fence each time: for stages that products have read, and nobody has written.
__device__ inline void arrive_at(u32 barrier, u32 rank) {
    asm volatile("{ .reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ inline void load_box(u32 target, const TensorMap &map, u32 barrier, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            target),
        "l"(&map), "r"(barrier), "r"(x), "r"(y)
        : "memory");
}

// The box arrives at the same place in every block of ``blocks`` (a bit each), and at the same barrier of each.
__device__ inline void load_box_to(u32 target, const TensorMap &map, u32 barrier, int x, int y, unsigned short blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(target),
                 "l"(&map), "r"(barrier), "r"(x), "r"(y), "h"(blocks)
                 : "memory");
}

// What lies outside the tensor is not written. The thread that asks waits for it with ``stores_read``.
__device__ inline void store_box(const TensorMap &map, u32 source, int x, int y) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(source),
                 "r"(x), "r"(y)
                 : "memory");
}

__device__ inline void stores_end() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Until the copy engine has read everything that this thread's stores were to write: its place may be used again.
__device__ inline void stores_read() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ inline void stores_done() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Until the kernels in front have ended; nothing that they write may be read before.
__device__ inline void after_those_in_front() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// The next kernel may be placed.
__device__ inline void let_next_in() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

#define NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_48                                                                                                       \
    NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_128                                                                                                      \
    NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, "  \
             "%84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, " \
             "%104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, "  \
             "%121, %122, %123, %124, %125, %126, %127"

// As hopper.cuh's: D[64, 2 · registers] = A · Bᵀ, or += where add is 1; both along_rows in shared memory.
__device__ inline void product(float (&d)[16], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %18, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE " {" NAMES_16 "}, %16, %17, add, 1, 1, 0, 0; }"
                 : HOLD_16(d, 0)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void product(float (&d)[48], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %50, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n96k16.f32." TYPE "." TYPE " {" NAMES_48 "}, %48, %49, add, 1, 1, 0, 0; }"
                 : HOLD_16(d, 0), HOLD_32(d, 16)
                 : "l"(a), "l"(b), "r"(add));
}

__device__ inline void product(float (&d)[128], u64 a, u64 b, int add) {
    asm volatile("{ .reg .pred add; setp.ne.b32 add, %130, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" NAMES_128
                 "}, %128, %129, add, 1, 1, 0, 0; }"
                 : HOLD_32(d, 0), HOLD_32(d, 32), HOLD_32(d, 64), HOLD_32(d, 96)
                 : "l"(a), "l"(b), "r"(add));
}
