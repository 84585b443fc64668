// FlashAttention-2's tiles of this build: two for each head dimension, which may be the same.
#pragma once

#include "config.h"
#include "params.h"

namespace cutlass_fmha {

struct StandardRow {
  ForwardConfig config;
  int smem_bytes;
  void (*kernel)(ForwardParams);
};

StandardRow standard_tile_32(bool other);
StandardRow standard_tile_64(bool other);
StandardRow standard_tile_96(bool other);
StandardRow standard_tile_128(bool other);
StandardRow standard_tile_192(bool other);
StandardRow standard_tile_256(bool other);

}  // namespace cutlass_fmha
