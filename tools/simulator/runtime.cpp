// The part of the CUDA runtime that the extension and nvcc's host code call, on one device that is this process's CPU.
//
// Environment, read anew each time: CUTLASS_FMHA_SIMULATED_ARCH, the device's compute capability (default 90), and
// CUTLASS_FMHA_SIMULATOR_SEED, which decides every order that is left open (default 0).
#include <cuda_runtime_api.h>
#include <fatbinary_section.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "warp.h"

namespace simulator {
namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string last_failure;  ///< what a kernel did wrong, for cudaGetErrorString

uint64_t environment_number(char const* name, uint64_t otherwise) {
  char const* const text = std::getenv(name);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

cudaError_t result(cudaError_t status) { return status == cudaSuccess ? status : last_error = status; }

struct Function {
  Program* program;
  std::string name;
  int dynamic_shared_limit = 48 * 1024;
};

/// By the address of nvcc's host function. Neither these nor their programs are ever destroyed.
std::map<void const*, Function>& functions() {
  static auto* const all = new std::map<void const*, Function>;
  return *all;
}

cudaError_t launch(void const* host_function, dim3 grid, dim3 block, void** arguments, size_t dynamic_shared) {
  Function const& function = functions().at(host_function);
  uint64_t const threads = uint64_t(block.x) * block.y * block.z, blocks = uint64_t(grid.x) * grid.y * grid.z;
  if (threads == 0 || threads > 1024 || blocks == 0) return result(cudaErrorInvalidConfiguration);
  if (dynamic_shared > static_cast<size_t>(function.dynamic_shared_limit)) return result(cudaErrorInvalidValue);
  try {
    run(function.program->kernel(function.name), {grid.x, grid.y, grid.z}, {block.x, block.y, block.z},
        static_cast<uint32_t>(dynamic_shared), arguments, environment_number("CUTLASS_FMHA_SIMULATOR_SEED", 0));
  } catch (Error const& error) {
    last_failure = error.what();
    return result(cudaErrorLaunchFailure);
  }
  return cudaSuccess;
}

/// The PTX in a fatbin, which holds it as it is: the build tells nvcc not to compress it.
std::string ptx_of(void const* fatbin_data) {
  // Of this format, which NVIDIA doesn't document, only two things are used: the size of the whole, and that PTX text
  // ends with a zero.
  struct Header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
  } header;
  std::memcpy(&header, fatbin_data, sizeof(header));
  std::string const all(static_cast<char const*>(fatbin_data), header.header_bytes + header.bytes);
  size_t const begin = all.find(".version");
  return begin == std::string::npos ? "" : all.substr(begin, all.find('\0', begin) - begin);
}

}  // namespace
}  // namespace simulator

// ---- what nvcc's host code calls -----------------------------------------------------------------------------------

extern "C" {

void** __cudaRegisterFatBinary(void* wrapper) {
  auto const* const data = static_cast<__fatBinC_Wrapper_t*>(wrapper)->data;
  return reinterpret_cast<void**>(new simulator::Program(simulator::ptx_of(data)));
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void** program, char const* host_function, char*, char const* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  simulator::functions()[host_function] = {reinterpret_cast<simulator::Program*>(program), name};
}

// Constant and global variables that the host doesn't touch.
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}

// Host functions that nvcc makes of kernels; nobody calls them here: launches go through cudaLaunchKernel.
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
cudaError_t __cudaGetKernel(cudaKernel_t*, void const*) { return cudaErrorNotSupported; }
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { return cudaErrorNotSupported; }

// ---- what the extension calls --------------------------------------------------------------------------------------

cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** arguments, size_t dynamic_shared,
                             cudaStream_t) {
  return simulator::launch(function, grid, block, arguments, dynamic_shared);
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  return simulator::launch(function, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes);
}

cudaError_t cudaFuncSetAttribute(void const* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  cudaDeviceProp device;
  cudaGetDeviceProperties(&device, 0);
  if (static_cast<size_t>(value) > device.sharedMemPerBlockOptin) return simulator::result(cudaErrorInvalidValue);
  return simulator::functions().at(function).dynamic_shared_limit = value, cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return simulator::result(device == 0 ? cudaSuccess : cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) return simulator::result(cudaErrorInvalidDevice);
  int const arch = simulator::environment_number("CUTLASS_FMHA_SIMULATED_ARCH", 90);
  *properties = {};
  std::strcpy(properties->name, "simulated");
  properties->major = arch / 10;
  properties->minor = arch % 10;
  properties->multiProcessorCount = 132;
  properties->l2CacheSize = 50 << 20;
  properties->sharedMemPerBlockOptin = (arch == 90 ? 227 : 99) * 1024;
  properties->sharedMemPerMultiprocessor = (arch == 90 ? 228 : 100) * 1024;
  properties->reservedSharedMemPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  cudaDeviceProp has;
  cudaError_t const status = cudaGetDeviceProperties(&has, device);
  *value = attribute == cudaDevAttrL2CacheSize ? has.l2CacheSize : has.multiProcessorCount;  // nobody asks for others
  return status;
}

cudaError_t cudaGetLastError() { return std::exchange(simulator::last_error, cudaSuccess); }
char const* cudaGetErrorString(cudaError_t status) {
  if (status == cudaErrorLaunchFailure) return simulator::last_failure.c_str();
  return status == cudaErrorInvalidValue ? "invalid argument" : "an error that the simulator has no words for";
}

cudaError_t cudaGetDriverEntryPointByVersion(char const* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* query) {
  bool const known = std::strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&simulator::encode_tiled) : nullptr;
  *query = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
