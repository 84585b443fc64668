// The table of compiled kernels. rows.cpp, which CMake generates from the manifest, has its rows; everything else,
// Python's selection included, reads this table and nothing else.
#pragma once

#include <cuda_runtime.h>

#include <variant>
#include <vector>

#include "backward/config.h"
#include "backward_wide/config.h"
#include "config.h"
#include "wide/config.h"

namespace cutlass_fmha {

struct Row {
  char const* name;  ///< also the kernel's symbol
  std::variant<ForwardConfig, WideConfig, WideScoredConfig, BackwardConfig, QueryProductConfig, WideBackwardConfig,
               HelperConfig>
      config;
  int smem_bytes;  ///< dynamic shared memory of a launch
  void const* kernel;

  Family family() const {
    return std::visit([](auto const& c) { return c.family(); }, config);
  }
  int arch() const {
    return std::visit([](auto const& c) { return c.arch; }, config);
  }
  DType dtype() const {
    return std::visit([](auto const& c) { return c.dtype; }, config);
  }
  int threads() const {
    return std::visit([](auto const& c) { return c.threads(); }, config);
  }
  bool dependent_launch() const {
    return std::visit([](auto const& c) { return c.dependent_launch; }, config);
  }
};

/// The rows of attention and of its backward in the manifest's order, then those beside them. A row's number is its
/// index here.
std::vector<Row> const& rows();

/// Throws std::invalid_argument where there is none.
Row const& row_at(int number);
Row const& helper(Family family, DType dtype, int arch);

/// Launches a kernel on `device`, which is current, and its stream `stream`. `params`: what the row's family takes.
/// `threads` and `smem_bytes`: of a block, where they are fewer than the row's. Allocates nothing, never synchronises.
/// Throws std::runtime_error.
void launch_kernel(Row const& row, dim3 grid, void const* params, int device, cudaStream_t stream, int threads = 0,
                   int smem_bytes = -1);

}  // namespace cutlass_fmha
