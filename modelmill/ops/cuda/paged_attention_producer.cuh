// The producer of paged_attention.cu, one warp: which tile is next, and where its queries, keys and values lie.
#pragma once

// Reads the sequences' lengths once and counts the tiles in front of each. Returns how many there are.
__device__ int make_tile_plan(TilePlan &plan, const Work &work, int lane) {
    int total = 0;
    for (int base = 0; base < work.batch; base += 32) {
        const int b = base + lane;
        const bool real = b < work.batch;
        const int start = real ? work.starts[b] : 0, rows = real ? work.starts[b + 1] - start : 0;
        const int tiles = work.skip_single && rows == 1 ? 0 : (rows + QUERIES - 1) / QUERIES;
        int sum = tiles;
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, sum, step);
            sum += lane >= step ? other : 0;
        }
        if (real) {
            plan.before[b] = total + sum - tiles;
            plan.start[b] = start;
            plan.start[b + 1] = start + rows;
            plan.length[b] = work.lengths[b];
        }
        total += __shfl_sync(~0u, sum, 31);
    }
    __syncwarp();
    return total;
}

// Tile number ``index`` in the order of service: some heads at a time, so that their keys stay in the L2 cache while all
// tiles of those heads read them; among those, the last queries first, which have the most keys, so that no large tile
// is left over at the end. Returns the sequence.
__device__ int find_tile(Tile &tile, const TilePlan &plan, const Work &work, int total, int index) {
    const int round = index / (total * work.heads_at_once), left = index - round * total * work.heads_at_once;
    const int number = total - 1 - left / work.heads_at_once;
    tile.head = round * work.heads_at_once + left % work.heads_at_once;
    int b = 0; // the last sequence with before[b] <= number
    for (int step = MAX_SEQUENCES; step > 0; step /= 2)
        if (b + step < work.batch && plan.before[b + step] <= number) b += step;
    const int offset = (number - plan.before[b]) * QUERIES, rows = plan.start[b + 1] - plan.start[b];
    tile.row = plan.start[b] + offset;
    tile.rows = min(rows - offset, QUERIES);
    tile.context = plan.length[b];
    tile.position = tile.context - rows + offset;
    tile.first = work.window > 0 ? max(tile.position + 1 - work.window, 0) / KEYS : 0;
    tile.last = tile.context > 0 ? (tile.position + tile.rows - 1) / KEYS : -1; // a context of 0 is padding
    return b;
}

// Lane's share of a block of keys or values: one page. A page past the context is asked for by a number that does not
// exist, and arrives as zeros.
__device__ inline void load_block(u32 target, const TensorMap &map, u32 full, u32 empty, u32 parity, int rows, int lane) {
    mbarrier_wait(empty, parity ^ 1);
    if (lane == 0) mbarrier_arrive_expect_tx(full, BLOCK_BYTES);
    __syncwarp();
    if (lane < PAGES) tma_load(target + lane * PAGE_BYTES, map, full, 0, 0, 0, rows);
}

__device__ void load(
    const TensorMap &q_map, const TensorMap &k_map, const TensorMap &v_map, const Work &work, TilePlan &plan, int lane) {
    const u32 base = shared_address(shared);
    Barriers &barriers = plan.barriers;
    pdl_wait();
    const int total = make_tile_plan(plan, work, lane), count = total * work.heads;
    Place q, k, v;
    for (int index = blockIdx.x; index < count; q.advance()) {
        // The tile after this one, asked for now: the answer takes as long as a load.
        int next = count;
        if (lane == 0 && work.taken != nullptr) next = gridDim.x + atomicAdd(work.taken, 1u);
        Tile tile;
        const int b = find_tile(tile, plan, work, total, index);
        const int *table = work.tables + b * static_cast<long long>(work.table_stride);
        const int kv_heads = work.heads / work.group, kv_head = tile.head / work.group;
        const int reach = min((tile.context + PAGE - 1) / PAGE, work.columns); // pages that exist
        // Of the lane's page in a block: where its rows begin in the cache, in eights.
        auto rows_of = [&](int block) {
            const int column = block * PAGES + lane;
            const int page = lane < PAGES && block >= tile.first && column < reach ? table[column] : work.pages;
            return (page * kv_heads + kv_head) * (PAGE / 8);
        };
        int rows = rows_of(tile.last), rows_behind = 0;
        mbarrier_wait(shared_address(&barriers.q_empty[q.stage]), q.parity ^ 1);
        if (lane == 0) {
            plan.tiles[q.stage] = tile;
            const u32 full = shared_address(&barriers.q_full[q.stage]), target = base + q.stage * Q_BYTES;
            mbarrier_arrive_expect_tx(full, Q_BYTES);
            for (int half = 0; half < HALVES; ++half)
                tma_load(target + half * Q_HALF, q_map, full, half * 64, tile.head, tile.row);
        }
        // In the order in which they are used: the values of a block after the keys of the next.
        for (int block = tile.last; block >= tile.first - 1; --block) {
            const int rows_ahead = rows_of(block - 1);
            if (block >= tile.first) {
                load_block(base + AT_K + k.stage * BLOCK_BYTES, k_map, shared_address(&barriers.k_full[k.stage]),
                           shared_address(&barriers.k_empty[k.stage]), k.parity, rows, lane);
                k.advance();
            }
            if (block < tile.last) {
                load_block(base + AT_V + v.stage * BLOCK_BYTES, v_map, shared_address(&barriers.v_full[v.stage]),
                           shared_address(&barriers.v_empty[v.stage]), v.parity, rows_behind, lane);
                v.advance();
            }
            rows_behind = rows, rows = rows_ahead;
        }
        index = __shfl_sync(~0u, next, 0);
    }
    mbarrier_wait(shared_address(&barriers.q_empty[q.stage]), q.parity ^ 1);
    if (lane == 0) {
        plan.tiles[q.stage].row = -1;
        mbarrier_arrive(shared_address(&barriers.q_full[q.stage]));
        // The last block to end leaves the counters as they were found; each has its last answer by then.
        if (work.taken != nullptr && atomicInc(work.taken + 1, gridDim.x - 1) == gridDim.x - 1) work.taken[0] = 0;
    }
}
