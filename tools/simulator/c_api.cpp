// The simulator for programs that bring PTX of their own: what its tests, in Python, load.
#include "warp.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

/// Runs a kernel; arguments[i] points to its parameter i. 0, or 1 and what went wrong in `error`.
EXPORTED int simulator_run(char const* ptx, char const* kernel, uint32_t blocks, uint32_t threads,
                           uint32_t dynamic_shared, void const* const* arguments, uint64_t seed, char* error,
                           size_t error_bytes) try {
  simulator::Program program(ptx);
  simulator::run(program.kernel(kernel), {blocks}, {threads}, dynamic_shared, arguments, seed);
  return 0;
} catch (simulator::Error const& failure) {
  std::string const text = failure.what();
  error[text.copy(error, error_bytes - 1)] = '\0';
  return 1;
}

/// A tensor map of 16-bit floats, as the driver's cuTensorMapEncodeTiled makes them; its CUresult.
EXPORTED int simulator_encode(CUtensorMap* map, void* address, cuuint64_t const* extents, cuuint64_t const* strides,
                              uint32_t const* box, uint32_t swizzle) {
  cuuint32_t const element_strides[] = {1, 1, 1, 1};
  return simulator::encode_tiled(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, address, extents, strides, box,
                                 element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 static_cast<CUtensorMapSwizzle>(swizzle), CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
