// The description of a tensor that the copy unit reads: what the simulated driver's cuTensorMapEncodeTiled makes.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace simulator {

/// In the 128 bytes of a CUtensorMap. Dimensions from the innermost one, whose elements are contiguous.
struct TensorMap {
  uint64_t mark;  ///< kTensorMapMark
  uint64_t address;
  uint64_t strides[5];  ///< bytes
  uint64_t extents[5];
  uint16_t box[5];
  uint16_t rank, element_bytes;
  uint16_t swizzle;  ///< bytes of the span in which it swizzles: 0, 32, 64 or 128
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

constexpr uint64_t kTensorMapMark = 0x70614d726f736e54;  // "TnsorMap"

/// The driver's function: checks what its documentation asks for.
CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                      cuuint64_t const* extents, cuuint64_t const* strides, cuuint32_t const* box,
                      cuuint32_t const* element_strides, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill);

}  // namespace simulator
