// Producer warp of the prefill attention kernel.
//
// Computes: the tile schedule (which queries of which sequence and head are next) and the loads of
//     queries, key pages and value pages
// Dtypes: bfloat16 or float16
// Layout: tiles in shared memory (128-byte swizzle), loaded page by page
// Range: 128 queries and 128 keys per tile, DIM 64 or 128, PAGE 8 … 128
// Technique: TMA, mbarrier pipelines
// Used by: paged_attention.cu
#pragma once

// Reads the sequences' lengths once and computes the prefix sum of their tiles. Returns the total.
__device__ int make_tile_plan(TilePlan& plan, const Work& work, int lane) {
    int total = 0;
    for (int base = 0; base < work.batch; base += 32) {
        const int b = base + lane;
        const bool valid = b < work.batch;
        const int start = valid ? work.starts[b] : 0, rows = valid ? work.starts[b + 1] - start : 0;
        const int tiles = work.skip_single && rows == 1 ? 0 : (rows + QUERIES - 1) / QUERIES;
        int sum = tiles;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (valid) {
            plan.first_tile[b] = total + sum - tiles;
            plan.start[b] = start;
            plan.start[b + 1] = start + rows;
            plan.length[b] = work.lengths[b];
        }
        total += __shfl_sync(~0u, sum, 31);
    }
    __syncwarp();
    return total;
}

// Tile `index` in scheduling order: heads_per_pass heads at a time, so that their keys stay in L2
// while all tiles of those heads run; among them the last queries first (most keys, longest first),
// to avoid a long tail. Returns the sequence.
__device__ int find_tile(Tile& tile, const TilePlan& plan, const Work& work, int total, int index) {
    const int round = index / (total * work.heads_per_pass),
              left = index - round * total * work.heads_per_pass;
    const int number = total - 1 - left / work.heads_per_pass;
    tile.head = round * work.heads_per_pass + left % work.heads_per_pass;
    int b = 0;  // the last sequence with before[b] <= number
    for (int step = MAX_SEQUENCES; step > 0; step /= 2)
        if (b + step < work.batch && plan.first_tile[b + step] <= number) b += step;
    const int offset = (number - plan.first_tile[b]) * QUERIES,
              rows = plan.start[b + 1] - plan.start[b];
    tile.row = plan.start[b] + offset;
    tile.rows = min(rows - offset, QUERIES);
    tile.context = plan.length[b];
    tile.position = tile.context - rows + offset;
    tile.first = work.window > 0 ? max(tile.position + 1 - work.window, 0) / KEYS : 0;
    // context 0: padding sequence
    tile.last = tile.context > 0 ? (tile.position + tile.rows - 1) / KEYS : -1;
    return b;
}

// Loads a block of keys or values, one page per lane. Pages past the context use an out-of-range
// row, which TMA fills with zeros.
__device__ inline void load_block(u32 target, const TensorMap& map, u32 full, u32 empty, u32 parity,
                                  int rows, int lane) {
    mbarrier_wait(empty, parity ^ 1);
    if (lane == 0) mbarrier_arrive_expect_tx(full, BLOCK_BYTES);
    __syncwarp();
    if (lane < PAGES) tma_load(target + lane * PAGE_BYTES, map, full, 0, 0, 0, rows);
}

__device__ void load(const TensorMap& q_map, const TensorMap& k_map, const TensorMap& v_map,
                     const Work& work, TilePlan& plan, int lane) {
    const u32 base = shared_address(shared);
    Barriers& barriers = plan.barriers;
    pdl_wait();
    const int total = make_tile_plan(plan, work, lane), count = total * work.heads;
    State q, k, v;
    for (int index = blockIdx.x; index < count; q.advance()) {
        // The atomic for the next tile is issued early to hide its latency.
        int next = count;
        if (lane == 0 && work.tile_counter != nullptr)
            next = gridDim.x + atomicAdd(work.tile_counter, 1u);
        Tile tile;
        const int b = find_tile(tile, plan, work, total, index);
        const int* table = work.tables + b * static_cast<long long>(work.table_stride);
        const int kv_heads = work.heads / work.group, kv_head = tile.head / work.group;
        // pages of the context
        const int num_pages = min((tile.context + PAGE - 1) / PAGE, work.columns);
        // First row of the lane's page of a block in the cache, in units of 8 rows.
        auto rows_of = [&](int block) {
            const int column = block * PAGES + lane;
            const int page = lane < PAGES && block >= tile.first && column < num_pages
                                 ? table[column]
                                 : work.pages;
            return (page * kv_heads + kv_head) * (PAGE / 8);
        };
        int rows = rows_of(tile.last), prev_rows = 0;
        mbarrier_wait(shared_address(&barriers.q_empty[q.stage]), q.parity ^ 1);
        if (lane == 0) {
            plan.tiles[q.stage] = tile;
            const u32 full = shared_address(&barriers.q_full[q.stage]),
                      target = base + q.stage * Q_BYTES;
            mbarrier_arrive_expect_tx(full, Q_BYTES);
            for (int half = 0; half < HALVES; ++half)
                tma_load(target + half * Q_HALF, q_map, full, half * 64, tile.head, tile.row);
        }
        // In order of use: the values of a block after the keys of the next block.
        for (int block = tile.last; block >= tile.first - 1; --block) {
            const int next_rows = rows_of(block - 1);
            if (block >= tile.first) {
                load_block(base + AT_K + k.stage * BLOCK_BYTES, k_map,
                           shared_address(&barriers.k_full[k.stage]),
                           shared_address(&barriers.k_empty[k.stage]), k.parity, rows, lane);
                k.advance();
            }
            if (block < tile.last) {
                load_block(base + AT_V + v.stage * BLOCK_BYTES, v_map,
                           shared_address(&barriers.v_full[v.stage]),
                           shared_address(&barriers.v_empty[v.stage]), v.parity, prev_rows, lane);
                v.advance();
            }
            prev_rows = rows, rows = next_rows;
        }
        index = __shfl_sync(~0u, next, 0);
    }
    mbarrier_wait(shared_address(&barriers.q_empty[q.stage]), q.parity ^ 1);
    if (lane == 0) {
        plan.tiles[q.stage].row = -1;
        mbarrier_arrive(shared_address(&barriers.q_full[q.stage]));
        // The last block to exit resets the counters; no block uses them afterwards.
        if (work.tile_counter != nullptr &&
            atomicInc(work.tile_counter + 1, gridDim.x - 1) == gridDim.x - 1)
            work.tile_counter[0] = 0;
    }
}
