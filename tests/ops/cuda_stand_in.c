/* A driver that runs nothing: it writes down the launches it is asked for. See test_triton_launch.py. */
#include <stdint.h>

#include "cuda.h"

#define DOES_NOTHING(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define GIVES(name, type, value, ...)                  \
  CUresult name(type *result, ##__VA_ARGS__) {         \
    *result = value;                                   \
    return CUDA_SUCCESS;                               \
  }

/* grid, threads, shared memory, stream, function; then two pointers, an int, a long and a float */
uint64_t launched[12];
int pointers_asked_about = 0;

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  uint64_t seen[] = {config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                     config->sharedMemBytes, (uint64_t)config->hStream, (uint64_t)function,
                     *(uint64_t *)arguments[0], *(uint64_t *)arguments[1], *(uint32_t *)arguments[2],
                     *(uint64_t *)arguments[3], *(uint32_t *)arguments[4]};
  for (int i = 0; i < 12; i++) launched[i] = seen[i];
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *result, CUpointer_attribute attribute, CUdeviceptr pointer) {
  pointers_asked_about++;
  *(CUdeviceptr *)result = pointer;
  return CUDA_SUCCESS;
}

GIVES(cuCtxGetCurrent, CUcontext, (CUcontext)1)
GIVES(cuCtxGetLimit, size_t, 0, CUlimit limit)
GIVES(cuDeviceGet, CUdevice, 0, int ordinal)
GIVES(cuDeviceGetAttribute, int, 232448, CUdevice_attribute attribute, CUdevice device)
GIVES(cuDevicePrimaryCtxRetain, CUcontext, (CUcontext)1, CUdevice device)
GIVES(cuDriverGetVersion, int, 13000)
GIVES(cuFuncGetAttribute, int, 1024, CUfunction_attribute attribute, CUfunction function)
GIVES(cuModuleGetFunction, CUfunction, (CUfunction)3, CUmodule module, const char *name)
GIVES(cuModuleLoadData, CUmodule, (CUmodule)2, const void *image)
DOES_NOTHING(cuCtxSetCurrent, CUcontext context)
DOES_NOTHING(cuCtxSetLimit, CUlimit limit, size_t value)
DOES_NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
DOES_NOTHING(cuGetErrorString, CUresult error, const char **text)
DOES_NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
