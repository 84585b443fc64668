#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>

#include "../core/approximate.cuh"
#include "../core/visibility.h"
#include "../device_guard.h"
#include "../helpers/launch.h"
#include "../launch.h"
#include "../require.h"
#include "../tensor_map.h"

namespace cutlass_fmha {
namespace {

constexpr float kTwiceLog2e = 2.8853901f;  // tanh(x) is a function of 2^(that x)

/// What p.bias_vectors and p.mask_vectors promise of elements of `bytes` each: those of `unit` bytes are one load.
bool score_vectors(void const* tensor, ScoreStrides const& stride, int bytes, int64_t unit) {
  return stride.key == 1 && reinterpret_cast<uintptr_t>(tensor) % unit == 0 &&
         (stride.batch | stride.head | stride.query) * bytes % unit == 0;
}

/// What p.raw_scores promises. A factor that the softmax applies is positive, and so large that nothing of it is lost.
bool raw_scores(FeatureParams const& p) {
  return p.softcap == 0.f && p.bias_type == BiasType::none && !p.alibi_slopes && p.scale >= FLT_MIN;
}

/// Whether scores are c tanh(x) and nothing else.
bool is_only_capped(FeatureParams const& p) {
  return p.softcap >= FLT_MIN && p.bias_type == BiasType::none && !p.alibi_slopes;
}

/// tanh(x) / x in powers of x^2, to 6e-7 of itself up to x = 1/2, and up to 1.
constexpr double kNearTanh[] = {0.9999994557709395, -0.33326317935937444, 0.13190296603150095, -0.04440222612594558};
constexpr double kFarTanh[] = {0.999999413596981,   -0.33329042367377376, 0.1328143379266095,
                               -0.0516056715581516, 0.016743112289158223, -0.0030670592223828487};

/// Whether all of the polynomials is numbers that no flush to zero takes away.
bool set_caps(FeatureParams& p) {
  double const scale = p.scale, ratio = scale / p.softcap;
  auto const set = [&]<int Terms>(CapSeries<Terms>& cap, double const(&series)[Terms], double end) {
    double power = scale * kLog2e, least = 1e30;
    for (int n = 0; n < Terms; ++n, power *= ratio * ratio) {
      cap.terms[n] = float(series[n] * power);
      least = std::min(least, std::abs(series[n] * power));
    }
    cap.limit = float(end / ratio);
    return least >= FLT_MIN;
  };
  return scale > 0. && std::max(ratio, scale) < 1e6 && set(p.near_cap, kNearTanh, 0.5) && set(p.far_cap, kFarTanh, 1.);
}

/// Of a score-mod row, which takes what it is called with.
Modifier find_modifier(FeatureParams& p) {
  bool const drops = p.dropout_threshold != 0;
  if (p.softcap == 0.f && !p.alibi_slopes && drops && p.raw_scores && p.pack == 1) return Modifier::dropout;
  if (p.softcap == 0.f && p.alibi_slopes && !drops && p.pack == 1) return Modifier::alibi;
  if (is_only_capped(p) && !drops && set_caps(p)) return Modifier::softcap;
  return Modifier::any;
}

/// Whether a masked row can read what it reads for each score by kMaskRun keys at once.
bool runs_of_four(FeatureParams const& p, int element_bytes) {
  auto const fine = [&](void const* tensor, ScoreStrides const& stride, int bytes) {
    return tensor == nullptr || (score_vectors(tensor, stride, bytes, kMaskRun * bytes) && p.seqlen_k % kMaskRun == 0 &&
                                 stride.query * bytes <= int64_t{UINT32_MAX});
  };
  return (p.mask_bits || fine(p.mask, p.mask_stride, 1)) &&
         (p.bias_type == BiasType::none || fine(p.bias, p.bias_stride, element_bytes));
}

void pack_mask(FeatureParams const& p, ForwardConfig const& c, int device, cudaStream_t stream) {
  MaskBits const bits = mask_bits(p, c);
  if (bits.words() == 0) return;
  bool const vectors = score_vectors(p.mask, p.mask_stride, 1, kMaskRun) && p.seqlen_k % kMaskRun == 0;
  int const queries = p.mask_stride.query != 0 ? p.seqlen_q : 1;
  PackMaskParams const pack{p.mask, p.mask_stride, p.mask_bits, bits, queries, p.seqlen_k, vectors};
  Row const& row = helper(Family::pack_mask, c.dtype, c.arch);
  int64_t const lines = int64_t{bits.batch} * bits.heads * bits.query_groups;
  int const blocks = ceil_div(bits.key_groups, row.threads() / MaskBits::kLanes);  // of a line
  launch_kernel(row, grid_of(row, lines * blocks), &pack, device, stream);
}

KeysStand keys_stand(FeatureParams const& p, int step_keys) {
  if (!p.vectors || p.block_counts) return KeysStand::anyhow;
  if (!p.page_table) return KeysStand::in_order;
  if (p.leftpad_k || p.page_size % kPageRun != 0) return KeysStand::anyhow;
  return p.page_size % step_keys == 0 ? KeysStand::whole_pages : KeysStand::page_runs;
}

/// What the launch finds out.
void find_out(FeatureParams& p, ForwardConfig const& c) {
  p.vectors = all_vectors(p, c.element_bytes());
  p.bias_vectors =
      score_vectors(p.bias, p.bias_stride, p.bias_type == BiasType::float32 ? sizeof(float) : c.element_bytes(), 16);
  p.mask_vectors = score_vectors(p.mask, p.mask_stride, sizeof(uint8_t), 8);
  if (p.mask_bits) p.bits_stride = mask_bits(p, c).strides();
  bool const by_softmax = !c.scored() || !p.sinks;  // scored rows start with a sink as a score
  p.raw_scores = by_softmax && raw_scores(p);
  p.score_unit = p.raw_scores ? p.scale : by_softmax && is_only_capped(p) ? p.softcap : 1.f;
  find_score_terms(p);
  p.modifier = c.modifies_scores() ? find_modifier(p) : Modifier::any;
  p.scale_log2 = p.scale * kLog2e;
  p.keys_before = p.window_right == 0 && !p.prefix_lengths;
  if (c.features == Features::ranges) {
    SplitScale const split(p.scale);
    p.scale = split.factor;
    p.q_and = split.q_and;
    p.q_xor = split.q_xor;
    p.raw_scores = true;
    p.score_unit = p.scale;
  }
  p.keys_stand = keys_stand(p, c.step_keys());
  bool const see_all = p.window_left < 0 && p.window_right < 0;
  p.near_first = see_all && p.alibi_slopes && c.modifies_scores() && p.keys_stand == KeysStand::in_order;
  p.device_lengths = device_lengths(p);
  if (p.block_counts) set_blocks(p, c.step_keys());
}

}  // namespace

void find_score_terms(FeatureParams& p) {
  p.cap_scale = p.softcap == 0.f ? 0.f : std::clamp(kTwiceLog2e * p.scale / p.softcap, -FLT_MAX, FLT_MAX);
  p.kept = KeptNumbers::of(p.dropout_threshold);
}

void launch_combine(FeatureParams const& p, DType dtype, int arch, int device, cudaStream_t stream) {
  if (p.splits == 1) return;
  CombineParams combined = make_combine(p);
  if (combined.empty()) return;
  Row const& row = helper(Family::combine, dtype, arch);
  // Columns of longer rows of O are combined one part after the other.
  int const step = CombineParams::kMaxHeadDim, columns = p.head_dim_v;
  for (int column = 0; column < columns; column += step) {
    combined.head_dim_v = std::min(step, columns - column);
    combined.partial_o = p.partial_o + column;
    combined.o = static_cast<char*>(p.o) + int64_t(column) * bytes_of(dtype);
    launch(row, combined, device, stream);
  }
}

void check_features(Row const& row, AttentionParams const& p) {
  auto const& c = std::get<ForwardConfig>(row.config);
  if (!c.scored()) {
    require(all_vectors(p, c.element_bytes()), [&] {
      return std::string(row.name) + " needs addresses, strides and head dims that are multiples of 16 bytes";
    });
    refuse(row, {{"mask", p.mask != nullptr && !c.reads_masks()},
                 {"block_counts", p.block_counts != nullptr},
                 {"bias", p.bias_type != BiasType::none && !c.reads_masks()},
                 {"splits", p.splits != 1}});
  }
  if (c.reads_masks()) {
    refuse(row, {{"a float32 bias", p.bias_type == BiasType::float32},
                 {"packed heads", p.pack != 1},
                 {"a mask beside a bias", p.mask && p.bias_type != BiasType::none}});
    require(runs_of_four(p, c.element_bytes()), [&] {
      return std::string(row.name) +
             " reads masks and biases by four keys: seqlen_k, their addresses and strides must be multiples of that";
    });
  }
  refuse(row, {{"mask_bits", p.mask_bits && (!c.reads_masks() || !p.mask || !reads_mask(c).bits)}});
  require(!c.reads_masks() || !p.mask || p.mask_bits || reads_mask(c).bytes || p.empty() || p.seqlen_k == 0,
          [&] { return std::string(row.name) + " reads a mask's bits, which need mask_bits"; });
  if (c.features == Features::ranges || c.reads_masks()) {
    refuse(row, {{"softcap", p.softcap != 0.f},
                 {"alibi_slopes", p.alibi_slopes != nullptr},
                 {"dropout_threshold", p.dropout_threshold != 0}});
  }
  require(p.head_dim <= c.head_dim && p.head_dim_v <= c.head_dim_v(), [&] {
    return std::string(row.name) + " takes head dims up to " + std::to_string(c.head_dim) + " and " +
           std::to_string(c.head_dim_v()) + ", got " + std::to_string(p.head_dim) + " and " +
           std::to_string(p.head_dim_v);
  });
  require(!p.block_counts || (p.block_m % c.tile_m == 0 && p.block_n % c.step_keys() == 0), [&] {
    return std::string(row.name) + " takes blocks of a mask that are multiples of " + std::to_string(c.tile_m) + " x " +
           std::to_string(c.step_keys()) + ", got " + std::to_string(p.block_m) + " x " + std::to_string(p.block_n);
  });
  if (c.copy == Copy::tma) {
    refuse(row, {{"leftpad_k with a page_table", p.leftpad_k != nullptr && p.page_table != nullptr}});
    require(p.empty() || p.seqlen_k == 0 || (p.entries_k > 0 && p.rows_k > 0), [&] {
      return std::string(row.name) + " copies by TMA, which asks for entries_k and rows_k: how large k and v are";
    });
  }
  require(!c.reads_masks() || p.mask || p.bias_type != BiasType::none || p.empty() || p.seqlen_k == 0,
          [&] { return std::string(row.name) + " asks for a mask or a bias"; });
}

void launch_features(Row const& row, AttentionParams const& p, int device, cudaStream_t stream) {
  auto const& c = std::get<ForwardConfig>(row.config);
  FeatureParams params = p;
  find_out(params, c);
  dim3 const grid = grid_of(row, grid_size(params, c.tile_m));
  set_schedule(params, tile_order(params, c.tile_m, c.warps, c.element_bytes(), gpu_of(device)), c.tile_m);
  if (params.mask_bits) pack_mask(params, c, device, stream);
  if (c.copy == Copy::tma) {
    FeatureTmaParams prepared(params);
    set_tensor_maps(prepared, c);
    return launch_kernel(row, grid, &prepared, device, stream);
  }
  launch_kernel(row, grid, &params, device, stream);
  launch_combine(params, c.dtype, c.arch, device, stream);
}

}  // namespace cutlass_fmha
