// The simulator for programs that bring PTX of their own: what its tests, in Python, load.
#include <string>

#include "launch.h"
#include "tensor_map.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

/// Runs a kernel; arguments[i] points to its parameter i. 0, or 1 and what went wrong in `error`.
EXPORTED int simulator_run(char const* ptx, char const* kernel, uint32_t const* grid, uint32_t const* block,
                           uint32_t dynamic_shared, void const* const* arguments, uint64_t seed, char* error,
                           size_t error_bytes) {
  try {
    simulator::Program program(ptx);
    simulator::run(program.kernel(kernel), {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, dynamic_shared,
                   arguments, seed);
    return 0;
  } catch (simulator::Error const& failure) {
    std::string const text = failure.what();
    error[text.copy(error, error_bytes - 1)] = '\0';
    return 1;
  }
}

/// A tensor map of 16-bit floats, as the driver's cuTensorMapEncodeTiled makes them; its CUresult.
EXPORTED int simulator_encode(void* map, uint32_t rank, void* address, uint64_t const* extents, uint64_t const* strides,
                              uint32_t const* box, uint32_t swizzle) {
  cuuint32_t const element_strides[] = {1, 1, 1, 1, 1};
  std::vector<cuuint64_t> const sizes(extents, extents + rank), steps(strides, strides + rank - 1);
  return simulator::encode_tiled(static_cast<CUtensorMap*>(map), CU_TENSOR_MAP_DATA_TYPE_FLOAT16, rank, address,
                                 sizes.data(), steps.data(), box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 static_cast<CUtensorMapSwizzle>(swizzle), CU_TENSOR_MAP_L2_PROMOTION_NONE,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}
