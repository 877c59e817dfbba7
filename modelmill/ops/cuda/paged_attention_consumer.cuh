// A consumer of paged_attention.cu, one warpgroup: scores, softmax and mixture of 64 queries of a tile.
#pragma once

constexpr int SCORES = KEYS / 2, MIXED = DIM / 2, WEIGHTS = KEYS / 4; // registers of a thread

// The running softmax of a thread's two rows.
struct Softmax {
    float top[2], mass[2]; // highest score so far, not scaled; sum of the weights of this thread's columns
    float keep[2];         // what remains of the mixture so far, now that the top has risen
    float shift[2];        // top, scaled

    __device__ void raise(const float (&s)[SCORES], float scale) {
        float most[4] = {top[0], top[0], top[1], top[1]}; // two of each row: a maximum waits for the one before
#pragma unroll
        for (int i = 0; i < SCORES; ++i) most[i % 4] = fmaxf(most[i % 4], s[i]);
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
            // Not top · scale − shift: fused, that is the rounding error of shift, which is huge while top is −1e30.
            keep[row] = exp2_fast((top[row] - most[row]) * scale);
            top[row] = most[row];
            mass[row] *= keep[row];
        }
    }

    // Scores become weights 2^(scale · (score − top)).
    __device__ void weigh(float (&s)[SCORES], float scale) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < SCORES; ++i) {
            s[i] = exp2_fast(s[i] * scale - shift[i % 4 / 2]);
            sum[i % 4] += s[i];
        }
        mass[0] += sum[0] + sum[1];
        mass[1] += sum[2] + sum[3];
    }
};

// Hides from each query the keys behind its own position, and those that its window has left behind.
// seen: of the thread's first row, the position minus the number of its first column.
__device__ inline void mask(float (&s)[SCORES], int seen, int window) {
    const int least = window > 0 ? seen - window : -(1 << 30);
#pragma unroll
    for (int i = 0; i < SCORES; ++i) {
        const int column = i / 4 * 8 + i % 2, down = i % 4 / 2 * 8;
        if (column > seen + down || column <= least + down) s[i] = __int_as_float(0xff800000); // −∞
    }
}

// S = Q · Kᵀ of this consumer's 64 queries and a block of keys.
__device__ inline void issue_scores(float (&s)[SCORES], u32 q, u32 k) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < DIM / 16; ++step) {
        const int half = step / 4, inside = step % 4 * 32;
        wgmma(s, k_major_descriptor(q + half * Q_HALF + inside, EIGHT_ROWS),
                k_major_descriptor(k + half * EIGHT_ROWS + inside, K_ROWS), step > 0);
    }
    wgmma_commit();
}

// O += P · V: the weights stay in registers, where the scores' layout is that of an operand once rounded.
__device__ inline void issue_mixture(float (&o)[MIXED], u32 (&p)[WEIGHTS], u32 v) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < KEYS / 16; ++step)
        wgmma(o, p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3],
                mn_major_descriptor(v + step * 2 * K_ROWS, EIGHT_ROWS, K_ROWS));
    wgmma_commit();
}

__device__ inline void round_weights(u32 (&p)[WEIGHTS], const float (&s)[SCORES]) {
#pragma unroll
    for (int i = 0; i < WEIGHTS; ++i) p[i] = rounded_pair(s[2 * i], s[2 * i + 1]);
}

__device__ inline void rescale(float (&o)[MIXED], const float (&keep)[2]) {
#pragma unroll
    for (int i = 0; i < MIXED; ++i) o[i] *= keep[i % 4 / 2];
}

// Slots of the last page that hold no token may hold anything; a weight of 0 does not silence a NaN among the values.
// Both consumers write the same zeros, so that neither needs to wait for the other.
__device__ inline void clean_values(u32 offset, int begin, int consumer, int thread) {
    const int end = (begin + PAGE - 1) / PAGE * PAGE;
    for (int i = thread; i < (end - begin) * 8 * HALVES; i += 128) {
        const int piece = i % 8, half = i / 8 % HALVES, row = begin + i / (8 * HALVES);
        const u32 at = offset + row / 8 * K_ROWS + half * EIGHT_ROWS + row % 8 * 128;
        reinterpret_cast<uint4 *>(shared + at)[piece] = make_uint4(0, 0, 0, 0);
    }
    fence_proxy_async();
    named_barrier_sync(CLEANED + consumer, 128);
}

// Divides by the mass and writes the rows that exist. Four lanes hold two columns each of four pieces of eight; they
// exchange them so that each writes one piece, 16 bytes.
__device__ inline void write_rows(const float (&o)[MIXED], Softmax &softmax, const Tile &tile, const Work &work, int row) {
    const int lane = threadIdx.x % 4;
    u32 *out = static_cast<u32 *>(work.out);
#pragma unroll
    for (int down = 0; down < 2; ++down) {
        float mass = softmax.mass[down];
        mass += __shfl_xor_sync(~0u, mass, 1);
        mass += __shfl_xor_sync(~0u, mass, 2);
        const float share = mass > 0.0f ? 1.0f / mass : 0.0f;
        const bool real = row + 8 * down < tile.rows;
        const long long at = (static_cast<long long>(tile.row + row + 8 * down) * work.heads + tile.head) * (DIM / 2);
#pragma unroll
        for (int i = 0; i < MIXED; i += 16) {
            u32 a[4];
#pragma unroll
            for (int piece = 0; piece < 4; ++piece) {
                const int from = i + 4 * piece + 2 * down;
                a[piece] = rounded_pair(o[from] * share, o[from + 1] * share);
            }
            const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
            for (int pair = 0; pair < 4; pair += 2) {
                const u32 got = __shfl_xor_sync(~0u, odd ? a[pair] : a[pair + 1], 1);
                (odd ? a[pair] : a[pair + 1]) = got;
            }
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                const u32 got = __shfl_xor_sync(~0u, upper ? a[pair] : a[pair + 2], 2);
                (upper ? a[pair] : a[pair + 2]) = got;
            }
            if (real) *reinterpret_cast<uint4 *>(out + at + i + 4 * lane) = make_uint4(a[0], a[1], a[2], a[3]);
        }
    }
}

__device__ inline void wait_turn(int consumer) {
    named_barrier_sync(TURN + consumer, 128 * CONSUMERS);
}

__device__ inline void pass_turn(int consumer) {
    named_barrier_arrive(TURN + 1 - consumer, 128 * CONSUMERS);
}

__device__ void consume(const Work &work, TilePlan &plan, int consumer) {
    const u32 base = shared_address(shared);
    const int thread = threadIdx.x % 128, lane = thread % 32, row = consumer * 64 + thread / 32 * 16 + lane / 4;
    Barriers &barriers = plan.barriers;
    Place q, k, v;
    auto release = [&](u64 &barrier) {
        if (lane == 0) mbarrier_arrive(shared_address(&barrier));
    };
    if (consumer == 1) pass_turn(consumer);
    for (;; q.advance()) {
        mbarrier_wait(shared_address(&barriers.q_full[q.stage]), q.parity);
        const Tile tile = plan.tiles[q.stage];
        const u32 queries = base + q.stage * Q_BYTES + consumer * 64 * 128;
        if (tile.row < 0) return;
        float s[SCORES], o[MIXED];
        u32 p[WEIGHTS];
        Softmax softmax;
        // Not −∞, whose differences are NaN where a row sees no key of a block.
        softmax.top[0] = softmax.top[1] = -1e30f;
        softmax.mass[0] = softmax.mass[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < MIXED; ++i) o[i] = 0.0f;
        auto keys_wait = [&] { mbarrier_wait(shared_address(&barriers.k_full[k.stage]), k.parity); };
        auto values_wait = [&] { mbarrier_wait(shared_address(&barriers.v_full[v.stage]), v.parity); };
        auto keys_done = [&] { release(barriers.k_empty[k.stage]), k.advance(); };
        auto values_done = [&] { release(barriers.v_empty[v.stage]), v.advance(); };
        auto mask_edges = [&](int block) {
            const int upper = tile.position + consumer * 64, begin = block * KEYS; // upper: the first row's position
            if (begin + KEYS - 1 > upper || (work.window > 0 && begin <= upper + 63 - work.window))
                mask(s, tile.position + row - begin - lane % 4 * 2, work.window);
        };
        if (tile.last >= tile.first) {
            keys_wait();
            issue_scores(s, queries, base + AT_K + k.stage * BLOCK_BYTES);
            wgmma_wait<0>();
            wgmma_fence_operand(s);
            keys_done();
            mask_edges(tile.last);
            softmax.raise(s, work.scale);
            softmax.weigh(s, work.scale);
            round_weights(p, s);
            const int real = tile.context - tile.last * KEYS; // keys of this block
            if (real < KEYS && real % PAGE != 0) {
                values_wait();
                clean_values(AT_V + v.stage * BLOCK_BYTES, real, consumer, thread);
            }
            if (tile.last > tile.first) keys_wait();
            for (int block = tile.last - 1; block >= tile.first; --block) {
                wait_turn(consumer);
                issue_scores(s, queries, base + AT_K + k.stage * BLOCK_BYTES);
                rescale(o, softmax.keep); // while the scores are computed
                values_wait();
                issue_mixture(o, p, base + AT_V + v.stage * BLOCK_BYTES);
                pass_turn(consumer);
                wgmma_wait<1>(); // the scores
                wgmma_fence_operand(s);
                keys_done();
                mask_edges(block);
                softmax.raise(s, work.scale); // while values are mixed
                softmax.weigh(s, work.scale);
                wgmma_fence_operand(s);
                // The next keys are waited for here, not where they are used: the compiler would move the wait for the
                // mixture up in front of the softmax, were there not a branch between the two.
                if (block > tile.first) keys_wait();
                wgmma_wait<0>();
                wgmma_fence_operand(o);
                wgmma_fence_operand(s); // nobody reads p any more: the weights may be rounded into it
                values_done();
                round_weights(p, s);
            }
            release(barriers.q_empty[q.stage]);
            rescale(o, softmax.keep);
            values_wait();
            issue_mixture(o, p, base + AT_V + v.stage * BLOCK_BYTES);
            wgmma_wait<0>();
            wgmma_fence_operand(o);
            values_done();
        } else {
            release(barriers.q_empty[q.stage]);
        }
        write_rows(o, softmax, tile, work, row);
    }
}
