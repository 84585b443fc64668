#include "tensor_map.h"

#include <cstring>

namespace simulator {
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      cuuint64_t const* extents, cuuint64_t const* strides, cuuint32_t const* box,
                      cuuint32_t const* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap result{};
  result.mark = kTensorMapMark;
  result.address = reinterpret_cast<uint64_t>(address);
  result.rank = static_cast<uint16_t>(rank);
  // Of other types there are none.
  bool const is_half = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16 || type == CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  result.element_bytes = is_half ? 2 : 0;
  // CU_TENSOR_MAP_SWIZZLE_32B and those that follow; what comes behind 128B is not simulated.
  int const span = swizzle == CU_TENSOR_MAP_SWIZZLE_NONE ? 0 : 16 << swizzle;
  if (rank < 1 || rank > 5 || result.element_bytes == 0 || span > 128 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (reinterpret_cast<uint64_t>(map) % 64 != 0 || address == nullptr || result.address % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  result.swizzle = static_cast<uint16_t>(span);
  for (cuuint32_t i = 0; i < rank; ++i) {
    result.extents[i] = extents[i];
    result.strides[i] = i == 0 ? result.element_bytes : strides[i - 1];
    result.box[i] = static_cast<uint16_t>(box[i]);
    if (extents[i] == 0 || extents[i] > uint64_t(1) << 32) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (result.strides[i] % 16 != 0 || result.strides[i] >= uint64_t(1) << 40))
      return CUDA_ERROR_INVALID_VALUE;
    if (box[i] == 0 || box[i] > 256 || element_strides[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  }
  int const row = result.box[0] * result.element_bytes;
  if (row % 16 != 0 || (span > 0 && row > span)) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &result, sizeof(result));
  return CUDA_SUCCESS;
}

}  // namespace simulator
