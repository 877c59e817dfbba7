// The loader of one_row.cu, one thread: tiles of the weight into the ring, and their scales.
#pragma once

__device__ inline void load_scales(const Work &w, const Layout &to, int tile, int slot) {
    const u32 each = 8 * w.groups * sizeof(Grid), full = barrier_of(to.barriers->scales[slot]);
    const u32 target = shared_address(to.grids) + slot * (OFFSET ? 4 : 2) * each;
    arrive_expecting(full, each * (OFFSET ? 4 : 2));
    for (int half = 0; half < 2; ++half) {
        const long long at = static_cast<long long>(first_row(w, tile, half)) * w.groups;
        load_bytes(target + half * each, w.scale + at, each, full);
        if (OFFSET) load_bytes(target + (2 + half) * each, w.offset + at, each, full);
    }
}

// By one thread. What lies behind a row's end is brought as zeros.
__device__ inline void load(const TensorMap &map, const Work &w, const Layout &to) {
    const int chunks = (w.bytes + CHUNK - 1) / CHUNK;
    int stage = 0, slot = 0;
    u32 parity = 1, scale_parity = 1; // a fresh barrier counts as having ended a phase of parity 1
    for (int tile = blockIdx.x; tile < w.tiles; tile += gridDim.x) {
        wait(barrier_of(to.barriers->scaled[slot]), scale_parity);
        load_scales(w, to, tile, slot);
        if (++slot == TILES_OF_SCALES) slot = 0, scale_parity ^= 1;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const u32 full = barrier_of(to.barriers->full[stage]), target = to.ring + stage * STAGE;
            wait(barrier_of(to.barriers->empty[stage]), parity);
            arrive_expecting(full, STAGE);
            for (int half = 0; half < 2; ++half) {
                for (int i = 0; i < BOXES; ++i)
                    load_box(target + i * BOX + half * (BOX / 2), map, full, (chunk * BOXES + i) * (PITCH / 4),
                             first_row(w, tile, half));
            }
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
    }
}
