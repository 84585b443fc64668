// The compile-time description of one kernel. A row of the manifest (templates.cmake) becomes one value of this type,
// which is the only template argument of the kernel: adding a knob means adding a field here and a column there.
#pragma once

namespace cutlass_fmha {

enum class DType : int { float16, bfloat16 };

/// How tiles travel between global and shared memory, which is also what alignment a row asks of its operands.
enum class Copy : int {
  cp_async_16,  ///< 16-byte cp.async: every pointer and every stride is a multiple of 16 bytes
  element,      ///< element by element through registers: any alignment, slower
  tma,          ///< K, V, Q and O by TMA: aligned as cp_async_16, sm_90 and later
  ldg_16,       ///< 16-byte loads straight into the registers of the mma that wants them, aligned as cp_async_16
};

struct ForwardConfig {
  int arch;     ///< the architecture the row is made for: 89, 90 or 120
  DType dtype;  ///< of Q, K, V and O; scores, softmax and accumulation are fp32
  int head_dim;
  int tile_m;           ///< query rows per thread block
  int tile_n;           ///< keys per step of the main loop
  int warps;            ///< in groups of kv_warps; each group owns kv_warps * tile_m / warps consecutive query rows
  int kv_warps = 1;     ///< warps that share their query rows and divide the keys; if more than 1, not element or tma
  int stages;           ///< buffers for K, and as many for V: in shared memory; ldg_16: 2 loads a block ahead
  int min_blocks;       ///< resident thread blocks per SM that registers must leave room for
  bool q_in_registers;  ///< keep Q's fragments in registers for the whole main loop
  bool ping_pong;       ///< warps w and w + warps/2 take turns: one issues mma while the other does softmax
  Copy copy;
  bool dependent_launch = false;  ///< starts beside the kernel ahead: split rows from sm_90 on, see overlaps()
  bool general = false;           ///< takes GeneralParams: every mask, score and shape; with cp_async_16 only
  int value_dim = 0;              ///< of general rows, where it isn't head_dim: that of V and O

  constexpr int head_dim_v() const { return value_dim ? value_dim : head_dim; }
  /// Whether launches overlap (dependent_launch.cuh). General rows for few queries always do, where the GPU can.
  constexpr bool overlaps() const { return dependent_launch || (general && kv_warps > 1 && arch >= 90); }
  constexpr int threads() const { return warps * 32; }
  constexpr int rows_per_warp() const { return tile_m * kv_warps / warps; }
  /// Bytes that pointers and strides of every operand must be a multiple of.
  constexpr int alignment() const { return copy == Copy::element || general ? 2 : 16; }
};

}  // namespace cutlass_fmha
