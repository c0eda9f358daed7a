// Work shared among threads. Defined once, in library.cpp, for all instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

typedef void (*Task)(void* context, int64_t item);

// Run task(context, i) for every i < items on up to `threads` threads. Items are assigned in no
// fixed order, so an item must write only its own results, which then do not depend on the number of threads.
void run_items(Task task, void* context, int64_t items, int64_t threads);

// At least `numbers` floats, aligned to a cache line, that belong to the calling thread until its next call.
float* scratch(size_t numbers);
