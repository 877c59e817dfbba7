// Consumer warpgroup of the prefill attention kernel.
//
// Computes: S = QKᵀ, online softmax in registers and O += PV for 64 queries of a tile
// Dtypes: operands bfloat16 or float16; S, O float32
// Layout: Q, K and V tiles in shared memory (128-byte swizzle), P in registers
// Range: 64 queries by 128 keys per step, DIM 64 or 128
// Technique: wgmma with P in registers, pingpong named barriers
// Used by: paged_attention.cu
#pragma once

constexpr int S_REGS = KEYS / 2, O_REGS = DIM / 2, P_REGS = KEYS / 4;  // registers of a thread

// The running softmax of a thread's two rows.
struct Softmax {
    // running maximum, unscaled; running sum over this thread's columns
    float row_max[2], row_sum[2];
    float correction[2];  // factor for the accumulators after the maximum has changed
    float shift[2];       // row_max · scale

    __device__ void update_max(const float (&s)[S_REGS], float scale) {
        // two per row, for shorter dependency chains
        float most[4] = {row_max[0], row_max[0], row_max[1], row_max[1]};
#pragma unroll
        for (int i = 0; i < S_REGS; ++i) most[i % 4] = fmaxf(most[i % 4], s[i]);
        // A row's columns are spread over four neighbouring lanes.
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            most[row] = fmaxf(most[2 * row], most[2 * row + 1]);
            most[row] = fmaxf(most[row], __shfl_xor_sync(~0u, most[row], 1));
        }
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            most[row] = fmaxf(most[row], __shfl_xor_sync(~0u, most[row], 2));
            shift[row] = most[row] * scale;
            // Not row_max · scale − shift: as an FMA it yields the rounding error of shift, huge
            // for −1e30.
            correction[row] = exp2_fast((row_max[row] - most[row]) * scale);
            row_max[row] = most[row];
            row_sum[row] *= correction[row];
        }
    }

    // P = 2^(scale · (score − row_max)), in place; accumulates row_sum.
    __device__ void exponentiate(float (&s)[S_REGS], float scale) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < S_REGS; ++i) {
            s[i] = exp2_fast(s[i] * scale - shift[i % 4 / 2]);
            sum[i % 4] += s[i];
        }
        row_sum[0] += sum[0] + sum[1];
        row_sum[1] += sum[2] + sum[3];
    }
};

// Causal and sliding-window mask. row_offset: position of the thread's first row minus the index of
// its first column.
__device__ inline void mask(float (&s)[S_REGS], int row_offset, int window) {
    const int window_start = window > 0 ? row_offset - window : -(1 << 30);
#pragma unroll
    for (int i = 0; i < S_REGS; ++i) {
        const int column = i / 4 * 8 + i % 2, down = i % 4 / 2 * 8;
        // −∞
        if (column > row_offset + down || column <= window_start + down)
            s[i] = __int_as_float(0xff800000);
    }
}

// S = Q · Kᵀ of this consumer's 64 queries and a block of keys.
__device__ inline void issue_qk(float (&s)[S_REGS], u32 q, u32 k) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int half = step / 4, inside = step % 4 * 32;
        wgmma(s, k_major_descriptor(q + half * Q_HALF + inside, SWIZZLE_ATOM_BYTES),
              k_major_descriptor(k + half * SWIZZLE_ATOM_BYTES + inside, K_ROWS), step > 0);
    }
    wgmma_commit();
}

// O += P · V with P in registers: the accumulator layout of S, rounded to 16 bits, is the A
// fragment.
__device__ inline void issue_pv(float (&o)[O_REGS], u32 (&p)[P_REGS], u32 v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
        wgmma(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
              mn_major_descriptor(v + step * 2 * K_ROWS, SWIZZLE_ATOM_BYTES, K_ROWS));
    wgmma_commit();
}

__device__ inline void convert_p(u32 (&p)[P_REGS], const float (&s)[S_REGS]) {
#pragma unroll
    for (int i = 0; i < P_REGS; ++i) p[i] = rounded_pair(s[2 * i], s[2 * i + 1]);
}

__device__ inline void rescale(float (&o)[O_REGS], const float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < O_REGS; ++i) o[i] *= correction[i % 4 / 2];
}

// Zeros the unused slots of the last page: they may hold NaN, which a weight of 0 does not remove.
// Both consumers write the same zeros, so that no barrier between them is needed.
__device__ inline void zero_tail_values(u32 offset, int begin, int consumer, int thread) {
    const int end = (begin + PAGE - 1) / PAGE * PAGE;
    for (int i = thread; i < (end - begin) * 8 * HALVES; i += 128) {
        const int piece = i % 8, half = i / 8 % HALVES, row = begin + i / (8 * HALVES);
        const u32 at = offset + row / 8 * K_ROWS + half * SWIZZLE_ATOM_BYTES + row % 8 * 128;
        reinterpret_cast<uint4*>(shared + at)[piece] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    named_barrier_sync(ZEROED_BARRIER + consumer, 128);
}

// Divides by row_sum and stores the valid rows. The four lanes of a quad transpose their values so
// that each stores 16 contiguous bytes.
__device__ inline void write_rows(const float (&o)[O_REGS], Softmax& softmax, const Tile& tile,
                                  const Work& work, int row) {
    const int lane = threadIdx.x % 4;
    u32* out = static_cast<u32*>(work.out);
#pragma unroll
    for (int down = 0; down < 2; ++down) {
        float row_sum = softmax.row_sum[down];
        row_sum += __shfl_xor_sync(~0u, row_sum, 1);
        row_sum += __shfl_xor_sync(~0u, row_sum, 2);
        const float share = row_sum > 0.0f ? 1.0f / row_sum : 0.0f;
        const bool real = row + 8 * down < tile.rows;
        const long long at =
            (static_cast<long long>(tile.row + row + 8 * down) * work.heads + tile.head) *
            (DIM / 2);
#pragma unroll
        for (int i = 0; i < O_REGS; i += 16) {
            u32 a[4];
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                const int from = i + 4 * piece + 2 * down;
                a[piece] = rounded_pair(o[from] * share, o[from + 1] * share);
            }
            const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2) {
                const u32 received = __shfl_xor_sync(~0u, odd ? a[pair] : a[pair + 1], 1);
                (odd ? a[pair] : a[pair + 1]) = received;
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const u32 received = __shfl_xor_sync(~0u, upper ? a[pair] : a[pair + 2], 2);
                (upper ? a[pair] : a[pair + 2]) = received;
            }
            if (real)
                *reinterpret_cast<uint4*>(out + at + i + 4 * lane) =
                    make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
}

__device__ inline void pingpong_wait(int consumer) {
    named_barrier_sync(PINGPONG_BARRIER + consumer, 128 * CONSUMERS);
}

__device__ inline void pingpong_arrive(int consumer) {
    named_barrier_arrive(PINGPONG_BARRIER + 1 - consumer, 128 * CONSUMERS);
}

__device__ void consume(const Work& work, TilePlan& plan, int consumer) {
    const u32 base = shared_address(shared);
    const int thread = threadIdx.x % 128, lane = thread % 32,
              row = consumer * 64 + thread / 32 * 16 + lane / 4;
    Barriers& barriers = plan.barriers;
    State q, k, v;
    auto release = [&](u64& barrier) {
        if (lane == 0) mbarrier_arrive(shared_address(&barrier));
    };
    if (consumer == 1) pingpong_arrive(consumer);
    for (;; q.advance()) {
        mbarrier_wait(shared_address(&barriers.q_full[q.stage]), q.parity);
        const Tile tile = plan.tiles[q.stage];
        const u32 q_tile = base + q.stage * Q_BYTES + consumer * 64 * 128;
        if (tile.row < 0) return;
        float s[S_REGS], o[O_REGS];
        u32 p[P_REGS];
        Softmax softmax;
        // Not −∞: −∞ − (−∞) is NaN for a row without a visible key in a block.
        softmax.row_max[0] = softmax.row_max[1] = -1e30f;
        softmax.row_sum[0] = softmax.row_sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < O_REGS; ++i) o[i] = 0.0f;
        auto keys_wait = [&] {
            mbarrier_wait(shared_address(&barriers.k_full[k.stage]), k.parity);
        };
        auto values_wait = [&] {
            mbarrier_wait(shared_address(&barriers.v_full[v.stage]), v.parity);
        };
        auto keys_done = [&] { release(barriers.k_empty[k.stage]), k.advance(); };
        auto values_done = [&] { release(barriers.v_empty[v.stage]), v.advance(); };
        auto mask_edges = [&](int block) {
            // upper: position of the first row
            const int upper = tile.position + consumer * 64, begin = block * KEYS;
            if (begin + KEYS - 1 > upper || (work.window > 0 && begin <= upper + 63 - work.window))
                mask(s, tile.position + row - begin - lane % 4 * 2, work.window);
        };
        if (tile.last >= tile.first) {
            keys_wait();
            issue_qk(s, q_tile, base + AT_K + k.stage * BLOCK_BYTES);
            wgmma_wait<0>();
            wgmma_fence_operand(s);
            keys_done();
            mask_edges(tile.last);
            softmax.update_max(s, work.scale);
            softmax.exponentiate(s, work.scale);
            convert_p(p, s);
            const int real = tile.context - tile.last * KEYS;  // valid keys of this block
            if (real < KEYS && real % PAGE != 0) {
                values_wait();
                zero_tail_values(AT_V + v.stage * BLOCK_BYTES, real, consumer, thread);
            }
            if (tile.last > tile.first) keys_wait();
            for (int block = tile.last - 1; block >= tile.first; --block) {
                pingpong_wait(consumer);
                issue_qk(s, q_tile, base + AT_K + k.stage * BLOCK_BYTES);
                rescale(o, softmax.correction);  // overlaps with QKᵀ
                values_wait();
                issue_pv(o, p, base + AT_V + v.stage * BLOCK_BYTES);
                pingpong_arrive(consumer);
                wgmma_wait<1>();  // QKᵀ
                wgmma_fence_operand(s);
                keys_done();
                mask_edges(block);
                softmax.update_max(s, work.scale);  // overlaps with PV
                softmax.exponentiate(s, work.scale);
                wgmma_fence_operand(s);
                // The wait for the next keys is placed here: without a branch in between, the
                // compiler moves the wait for PV in front of the softmax.
                if (block > tile.first) keys_wait();
                wgmma_wait<0>();
                wgmma_fence_operand(o);
                wgmma_fence_operand(s);  // PV has read p: it may be overwritten
                values_done();
                convert_p(p, s);
            }
            release(barriers.q_empty[q.stage]);
            rescale(o, softmax.correction);
            values_wait();
            issue_pv(o, p, base + AT_V + v.stage * BLOCK_BYTES);
            wgmma_wait<0>();
            wgmma_fence_operand(o);
            values_done();
        } else {
            release(barriers.q_empty[q.stage]);
        }
        write_rows(o, softmax, tile, work, row);
    }
}
