// What is compiled once: the choice of the instruction set, the threads, and the functions Python calls.
//
// Threads are those of the OpenMP runtime that PyTorch has loaded, found by name. A pool of our own would
// compete with it for the cores, because OpenMP's workers spin for milliseconds after every parallel call
// of PyTorch. Where there is no OpenMP, or after a fork (the child has lost its workers and would wait for
// them forever), threads are started for each call.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "arguments.h"
#include "threads.h"

namespace {

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

Parallel openmp = nullptr;

void find_threads() {
    openmp = (Parallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    pthread_atfork(nullptr, nullptr, [] { openmp = nullptr; });
}

struct Job {
    Task task;
    void* context;
    int64_t items;
    std::atomic<int64_t> next{0};
};

void work(void* data) {
    Job& job = *(Job*)data;
    for (int64_t i; (i = job.next++) < job.items;) job.task(job.context, i);
}

struct Memory {
    float* data = nullptr;
    size_t numbers = 0;
    ~Memory() { free(data); }
};

}  // namespace

void run_items(Task task, void* context, int64_t items, int64_t threads) {
    Job job{task, context, items};
    if (threads > items) threads = items;
    if (threads <= 1) return work(&job);
    if (openmp) return openmp(work, &job, (unsigned)threads, 0);
    std::vector<std::thread> helpers;
    try {
        for (int64_t i = 1; i < threads; i++) helpers.emplace_back(work, &job);
    } catch (const std::system_error&) {
        // the system gave fewer threads than wanted: those there are take the work
    }
    work(&job);
    for (std::thread& helper : helpers) helper.join();
}

float* scratch(size_t numbers) {
    static thread_local Memory memory;
    if (memory.numbers < numbers) {
        free(memory.data);
        memory.data = nullptr;
        memory.numbers = 0;
        void* data = nullptr;
        if (posix_memalign(&data, 64, numbers * sizeof(float))) std::abort();
        memory.data = (float*)data;
        memory.numbers = numbers;
    }
    return memory.data;
}

#define KERNELS(set)                        \
    extern "C" {                            \
    void scan_forward_##set(const Scan*);   \
    void scan_backward_##set(const Scan*);  \
    void delta_forward_##set(const Delta*); \
    void delta_backward_##set(const Delta*); \
    void channel_forward_##set(const Delta*); \
    void channel_backward_##set(const Delta*); \
    void gated_forward_##set(const Gated*); \
    void gated_backward_##set(const Gated*); \
    void convolution_forward_##set(const Convolution*); \
    void convolution_backward_##set(const Convolution*); \
    }

KERNELS(portable)
#ifdef HAS_AVX
KERNELS(avx2)
KERNELS(avx512)
#endif

namespace {

struct Kernels {
    const char* name;
    void (*scan_forward)(const Scan*);
    void (*scan_backward)(const Scan*);
    void (*delta_forward)(const Delta*);
    void (*delta_backward)(const Delta*);
    void (*channel_forward)(const Delta*);
    void (*channel_backward)(const Delta*);
    void (*gated_forward)(const Gated*);
    void (*gated_backward)(const Gated*);
    void (*convolution_forward)(const Convolution*);
    void (*convolution_backward)(const Convolution*);
};

#define ROW(set)                                                                                      \
    {#set, scan_forward_##set, scan_backward_##set, delta_forward_##set, delta_backward_##set,        \
     channel_forward_##set, channel_backward_##set, gated_forward_##set, gated_backward_##set,      \
     convolution_forward_##set, convolution_backward_##set}

const Kernels all_kernels[] = {
#ifdef HAS_AVX
    ROW(avx512), ROW(avx2),
#endif
    ROW(portable)};

bool runs_here(const Kernels& kernels) {
#ifdef HAS_AVX
    __builtin_cpu_init();
    if (kernels.name[3] == '5')
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw");
    if (kernels.name[0] == 'a') return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return true;
}

const Kernels* chosen = nullptr;

}  // namespace

extern "C" {

// Called once, before anything else. The best instruction set this processor has, from the `from`-th on.
const char* statetrack_start(int64_t from) {
    find_threads();
    const int64_t count = sizeof(all_kernels) / sizeof(Kernels);
    if (from > count - 1) from = count - 1;
    chosen = all_kernels + from;
    while (!runs_here(*chosen)) chosen++;
    return chosen->name;
}

// Ask for large pages under memory not written yet: first touches of small ones cost more than arithmetic.
void statetrack_large_pages(int64_t address, int64_t bytes) {
#ifdef MADV_HUGEPAGE
    const int64_t page = 2 << 20, start = (address + page - 1) / page * page;
    const int64_t stop = (address + bytes) / page * page;
    if (start < stop) madvise((void*)start, stop - start, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

int64_t statetrack_arguments(int64_t which) {
    const int64_t sizes[] = {sizeof(Scan), sizeof(Delta), sizeof(Gated), sizeof(Convolution)};
    return which < 4 ? sizes[which] : 0;
}

void statetrack_scan_forward(const Scan* arguments) { chosen->scan_forward(arguments); }
void statetrack_scan_backward(const Scan* arguments) { chosen->scan_backward(arguments); }
void statetrack_delta_forward(const Delta* arguments) { chosen->delta_forward(arguments); }
void statetrack_delta_backward(const Delta* arguments) { chosen->delta_backward(arguments); }
void statetrack_channel_forward(const Delta* arguments) { chosen->channel_forward(arguments); }
void statetrack_channel_backward(const Delta* arguments) { chosen->channel_backward(arguments); }
void statetrack_gated_forward(const Gated* arguments) { chosen->gated_forward(arguments); }
void statetrack_gated_backward(const Gated* arguments) { chosen->gated_backward(arguments); }
void statetrack_convolution_forward(const Convolution* arguments) { chosen->convolution_forward(arguments); }
void statetrack_convolution_backward(const Convolution* arguments) { chosen->convolution_backward(arguments); }
}
