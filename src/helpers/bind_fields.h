// Fields that the parameters of several kernels have.
#pragma once

#include "../fields.h"
#include "params.h"

namespace cutlass_fmha {

template <class Params>
void bind_position(pybind11::class_<Params>& c) {
  address(c, "first_position", [](Params& p) -> auto& { return p.position.first; });
  address(c, "before_position", [](Params& p) -> auto& { return p.position.before; });
}

template <class Params>
void bind_places(pybind11::class_<Params>& c) {
  number(c, "page_size", &CachePlaces::page_size);
  number(c, "entries", &CachePlaces::entries);
  number(c, "capacity", &CachePlaces::capacity);
  address(c, "cache_seqlens", &CachePlaces::cache_seqlens);
  address(c, "cache_batch_idx", &CachePlaces::cache_batch_idx);
  address(c, "page_table", &CachePlaces::page_table);
  stride(c, "page_table_stride", &CachePlaces::page_table_stride);
}

inline void check_rotary(Rotary const& rotary, int head_dim) {
  require(rotary.dim % 2 == 0 && rotary.dim <= head_dim, [&] {
    return "rotary dim must be even and at most head_dim " + std::to_string(head_dim) + ", got " +
           std::to_string(rotary.dim);
  });
}

}  // namespace cutlass_fmha
