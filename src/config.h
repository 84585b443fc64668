// The compile-time description of one kernel. A row of the manifest (rows.cmake) becomes one value of a type of
// this file, which is the only template argument of its kernel: adding a knob means adding a field here and a column
// there.
#pragma once

namespace cutlass_fmha {

/// What tensors are made of; scores, softmax and accumulation are fp32.
enum class DType : int { float16, bfloat16, float32 };

constexpr int kDTypes = 3;
constexpr char const* name_of(DType dtype) {
  constexpr char const* kNames[] = {"float16", "bfloat16", "float32"};
  return kNames[int(dtype)];
}
constexpr int bytes_of(DType dtype) { return dtype == DType::float32 ? 4 : 2; }

/// What multiplies, and how exactly.
enum class MmaKind : int {
  m16n8k16,  ///< tensor cores on 16-bit operands, sums in float32
  tf32x3,    ///< float32 as sums of two TF32 numbers, three products each: drops 2^-20 of a product at most
  simt,      ///< float32 FMAs: exact to float32, any alignment; on sm_89 and sm_120 faster than tf32x3
};
constexpr char const* name_of(MmaKind mma) {
  constexpr char const* kNames[] = {"m16n8k16", "tf32x3", "simt"};
  return kNames[int(mma)];
}

/// What a kernel's source or launch does otherwise on one architecture than on another. Instructions are nvcc's matter.
struct Architecture {
  int number;           ///< 89, 90 or 120
  bool copy_unit;       ///< has TMA, and launches that overlap
  bool fast_memory;     ///< HBM: small tiles of all heads may be in flight at once, whatever the L2 cache holds
  bool uniform_phases;  ///< what a warp asks for in every phase stays in uniform registers, where O needs all others
};
constexpr Architecture kArchitectures[] = {{89, false, false, false}, {90, true, true, true}, {120, true, false, true}};

/// How tiles travel between global and shared memory, which is also what alignment a row asks of its operands.
enum class Copy : int {
  cp_async_16,  ///< 16-byte cp.async: every pointer and every stride is a multiple of 16 bytes
  element,      ///< element by element through registers: any alignment, slower
  tma,          ///< K, V, Q and O by TMA: aligned as cp_async_16, sm_90 and later
  ldg_16,       ///< 16-byte loads straight into the registers of the mma that wants them, aligned as cp_async_16
};
constexpr char const* name_of(Copy copy) {
  constexpr char const* kNames[] = {"cp_async_16", "element", "tma", "ldg_16"};
  return kNames[int(copy)];
}

/// What a row knows beside Q, K, V and a diagonal. Rows that know more than `none` take FeatureParams.
enum class Features : int {
  none,
  ranges,      ///< which keys a query sees and where they stand: lengths, packed documents, windows, pages, head dims,
               ///< sinks
  score_mods,  ///< also what becomes of a score by itself: softcap, ALiBi, dropout
  masks,       ///< ranges, and what is read for each score: a mask, a 16-bit bias
  scores,      ///< all of that, and masks, biases, lists of blocks, parts of the keys, any alignment
};
constexpr char const* name_of(Features features) {
  constexpr char const* kNames[] = {"none", "ranges", "score_mods", "masks", "scores"};
  return kNames[int(features)];
}

/// What a kernel is for. All of a family are launched alike and read the same parameters.
enum class Family : int {
  plain,             ///< attention with no more than a diagonal: each warp walks all keys of its query rows
  few_query,         ///< the same for problems with few query rows: warps share rows and divide the keys
  ranged,            ///< plain rows' tiles and turns, for every range of keys that FeatureParams says
  score_mod,         ///< the same where scores are capped, get distances by ALiBi, or are dropped
  masked,            ///< the same where a mask hides keys, or a 16-bit bias is added
  scored,            ///< every mask, score and shape that it says
  few_query_scored,  ///< the same for few query rows
  wide,              ///< float32, and head dims above 256
  wide_scored,       ///< the same for every mask, score and shape that FeatureParams says
  combine,           ///< of what splits of the keys gave
  merge_tail,        ///< of what the parts of a plain row's tail gave
  pack_mask,         ///< for masked rows
  merge,             ///< of two states
  append,            ///< to caches
  rotary,
  rope,             ///< of queries and keys together, with their norms and a cache's new rows
  rope_backward,    ///< of that with norms
  rope_weights,     ///< what those rows leave of the gradients of weights
  backward,         ///< gradients of Q, K and V: a thread block owns keys and walks the queries that see them
  backward_before,  ///< what those rows want of each query row, and dQ's sums at zero
  backward_after,   ///< dQ's sums become dQ
  backward_lists,   ///< the transpose of block lists
  query_product,    ///< dQ of dS, which a row of the backward wrote
  backward_wide,    ///< gradients of float32, and of head dims above 256: a block owns rows of one of them
  rms_norm,
  rms_norm_backward,  ///< gradients of its rows, and of its weights partial sums
  rms_norm_weights,   ///< of the sums
  gated,              ///< units: an activation of one tensor times another
  gated_backward,
};
constexpr char const* name_of(Family family) {
  constexpr char const* kNames[] = {"plain",
                                    "few_query",
                                    "ranged",
                                    "score_mod",
                                    "masked",
                                    "scored",
                                    "few_query_scored",
                                    "wide",
                                    "wide_scored",
                                    "combine",
                                    "merge_tail",
                                    "pack_mask",
                                    "merge",
                                    "append",
                                    "rotary",
                                    "rope",
                                    "rope_backward",
                                    "rope_weights",
                                    "backward",
                                    "backward_before",
                                    "backward_after",
                                    "backward_lists",
                                    "query_product",
                                    "backward_wide",
                                    "rms_norm",
                                    "rms_norm_backward",
                                    "rms_norm_weights",
                                    "gated",
                                    "gated_backward"};
  return kNames[int(family)];
}

/// What every kernel that walks tiles has.
struct TileConfig {
  int arch;     ///< the architecture the row is made for: 89, 90 or 120
  DType dtype;  ///< of Q, K, V and O
  int head_dim;
  int tile_m;      ///< query rows per thread block
  int tile_n;      ///< keys per step of the main loop
  int warps;       ///< of a thread block
  int min_blocks;  ///< resident thread blocks per SM that registers must leave room for
  MmaKind mma = MmaKind::m16n8k16;
  bool dependent_launch = false;  ///< starts beside the kernel ahead (core/dependent_launch.cuh): from sm_90 on

  constexpr int threads() const { return 32 * warps; }
  constexpr int element_bytes() const { return bytes_of(dtype); }
  /// Where operands pass through shared memory in steps (wide/steps.cuh): dimensions of those of scores that are there
  /// at a time, and columns of what is summed.
  constexpr int step_dims() const { return 128 / element_bytes(); }
  constexpr int step_columns() const { return 256 / element_bytes(); }
  constexpr Architecture architecture() const {
    for (Architecture const& known : kArchitectures) {
      if (known.number == arch) return known;
    }
    return {};
  }
};

/// How a 16-bit row up to head dim 256 is made.
struct ForwardOptions {
  int kv_warps = 1;     ///< warps that share their query rows and divide the keys: of `warps`, groups of so many
  int stages;           ///< buffers for K, and as many for V: in shared memory; ldg_16: 2 loads a block ahead
  bool q_in_registers;  ///< keep Q's fragments in registers for the whole main loop
  bool ping_pong;       ///< warps w and w + warps/2 take turns: one issues mma while the other does softmax
  Copy copy;            ///< with kv_warps > 1 neither element nor, before sm_90, tma
  Features features = Features::none;  ///< others with cp_async_16 only, and with kv_warps > 1 all of them
  int value_dim = 0;                   ///< with features, where it isn't head_dim: that of V and O
};

struct ForwardConfig : TileConfig, ForwardOptions {
  constexpr Family family() const {
    if (takes_features() && kv_warps > 1) return Family::few_query_scored;
    switch (features) {
      case Features::ranges:
        return Family::ranged;
      case Features::score_mods:
        return Family::score_mod;
      case Features::masks:
        return Family::masked;
      case Features::scores:
        return Family::scored;
      case Features::none:
        break;
    }
    return kv_warps > 1 ? Family::few_query : Family::plain;
  }
  constexpr bool takes_features() const { return features != Features::none; }
  constexpr bool scored() const { return features == Features::scores; }
  /// By softcap, ALiBi or dropout alone.
  constexpr bool modifies_scores() const { return features == Features::score_mods; }
  /// What is read for each score comes in registers, asked for before a turn.
  constexpr bool reads_masks() const { return features == Features::masks; }
  constexpr int head_dim_v() const { return value_dim ? value_dim : head_dim; }
  /// Each group of kv_warps warps owns this many consecutive query rows.
  constexpr int rows_per_warp() const { return tile_m * kv_warps / warps; }
  /// Keys that a step of the main loop takes.
  constexpr int step_keys() const { return tile_n * kv_warps; }
  /// Bytes that pointers and strides of every operand must be a multiple of.
  constexpr int alignment() const { return copy == Copy::element || scored() ? element_bytes() : 16; }
};

/// Registers of a thread that its warp's fragments of O, S and P, and Q where it is kept, leave free.
constexpr int spare_registers(ForwardConfig const& c) {
  int const per_thread = 65536 / (c.threads() * c.min_blocks), most = per_thread < 255 ? per_thread : 255;
  int const halves = 2 * c.head_dim_v() + 3 * c.tile_n + (c.q_in_registers ? c.head_dim : 0);
  return most - c.rows_per_warp() * halves / 64;
}

/// Whether so many are left that phases that need a mask have a loop of their own, so that the long one need not ask,
/// and what can be computed before it is.
constexpr bool is_roomy(ForwardConfig const& c) { return spare_registers(c) >= 90; }

/// A kernel that computes no attention.
struct HelperConfig {
  Family kind;
  int arch;
  DType dtype;
  bool dependent_launch = false;
  int block = kThreads;

  static constexpr int kThreads = 128;
  constexpr Family family() const { return kind; }
  constexpr int threads() const { return block; }
};

}  // namespace cutlass_fmha
