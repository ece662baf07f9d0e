// A CUDA driver and runtime that do nothing but write down the launches they are asked for, as lines of JSON.
// Preloaded into a process without a GPU, it shows what the host side of a kernel really asks the driver to do.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static char log_text[1 << 20];
static size_t log_length;

const char* no_driver_log(void) { return log_text; }
void no_driver_clear(void) { log_text[log_length = 0] = 0; }

static void say(const char* format, ...) {
  va_list list;
  va_start(list, format);
  int n = vsnprintf(log_text + log_length, sizeof log_text - log_length, format, list);
  va_end(list);
  if (n > 0 && log_length + n < sizeof log_text) log_length += n;
}

static void say_launch(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared) {
  say("{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], \"shared_bytes\": %u", (const char*)f, gx,
      gy, gz, bx, by, bz, shared);
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void** arguments, void** extra) {
  say_launch(f, gx, gy, gz, bx, by, bz, shared);
  say("}\n");
  return CUDA_SUCCESS;
}

CUresult cuLaunchCooperativeKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void** arguments) {
  say_launch(f, gx, gy, gz, bx, by, bz, shared);
  say(", \"cooperative\": true}\n");
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction f, void** arguments, void** extra) {
  say_launch(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes);
  for (unsigned i = 0; i < c->numAttrs; i++) {
    const CUlaunchAttributeValue* v = &c->attrs[i].value;
    switch (c->attrs[i].id) {
      case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
        say(", \"cluster\": [%u, %u, %u]", v->clusterDim.x, v->clusterDim.y, v->clusterDim.z);
        break;
      case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
        say(", \"cooperative\": %s", v->cooperative ? "true" : "false");
        break;
      case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
        say(", \"pdl\": %s", v->programmaticStreamSerializationAllowed ? "true" : "false");
        break;
      default:
        say(", \"attribute_%d\": true", (int)c->attrs[i].id);
    }
  }
  say("}\n");
  return CUDA_SUCCESS;
}

// A module is anything, a function is its name.
CUresult cuModuleLoadData(CUmodule* module, const void* image) { return *module = (CUmodule)1, CUDA_SUCCESS; }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* f, CUmodule module, const char* name) {
  return *f = (CUfunction)strdup(name), CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult e, const char** text) { return *text = "no driver", CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult e, const char** text) { return *text = "no driver", CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int length, CUdevice d) { return strncpy(name, "none", length), CUDA_SUCCESS; }

static int device;
cudaError_t cudaSetDevice(int d) { return device = d, cudaSuccess; }
cudaError_t cudaGetDevice(int* d) { return *d = device, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* n) { return *n = 1, cudaSuccess; }
cudaError_t cudaGetLastError(void) { return cudaSuccess; }
cudaError_t cudaPeekAtLastError(void) { return cudaSuccess; }
const char* cudaGetErrorString(cudaError_t e) { return "no driver"; }
cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr a, int d) {
  *value = a == cudaDevAttrComputeCapabilityMajor           ? 9
           : a == cudaDevAttrMultiProcessorCount            ? 132
           : a == cudaDevAttrMaxSharedMemoryPerBlockOptin ? 232448
                                                            : 0;
  return cudaSuccess;
}
