// What machine.cpp, async_copy.cpp and tensor_core.cpp share: chance, and what happens behind the
// threads' backs.
#pragma once
#include "machine.h"
#include <random>

namespace emu {
extern std::mt19937 generator;
unsigned thread_in_cluster();
unsigned char* memory_of(unsigned rank);
bool some_copies_land();  // now and then a few of them, whichever; whether any did
bool copies_left();
void forget_copies();
void front_begins(const Stretch* stretches, unsigned count);
void front_ends();
void forget_products();
}  // namespace emu
