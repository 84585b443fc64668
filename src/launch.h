// Launching attention: of each family, what its rows can't take, and what their kernels read besides what was asked.
#pragma once

#include <array>
#include <initializer_list>

#include "attention_params.h"
#include "table.h"

namespace cutlass_fmha {

/// Throws std::invalid_argument for what the row can't take: a kernel believes what it is given.
void check(Row const& row, AttentionParams const& p);

/// Launches a row that check() passes on `device`, which is current, and its stream `stream`; what merges the parts of
/// a tail or of split keys follows on the stream. Allocates nothing, never synchronises. Throws std::runtime_error, and
/// std::invalid_argument where there are more tiles than a grid holds.
void launch(Row const& row, AttentionParams const& p, int device, cudaStream_t stream);

// ---- of a family: called by the above ----------------------------------------------------------------------------

void check_plain(Row const& row, AttentionParams const& p);
void check_features(Row const& row, AttentionParams const& p);
void check_wide(Row const& row, AttentionParams const& p);
void check_wide_scored(Row const& row, AttentionParams const& p);

void launch_plain(Row const& row, AttentionParams const& p, int device, cudaStream_t stream);
void launch_features(Row const& row, AttentionParams const& p, int device, cudaStream_t stream);
void launch_wide(Row const& row, AttentionParams const& p, int device, cudaStream_t stream);
void launch_wide_scored(Row const& row, AttentionParams const& p, int device, cudaStream_t stream);

/// FeatureParams::cap_scale and kept.
void find_score_terms(FeatureParams& p);

/// Merges the parts of split keys, where there are some.
void launch_combine(FeatureParams const& p, DType dtype, int arch, int device, cudaStream_t stream);

/// A launch's grid, or std::invalid_argument.
dim3 grid_of(Row const& row, int64_t blocks);

struct Operand {
  char const* name;
  void const* address;
  Strides stride;
  int seqlen, heads;
};
/// q, k, v and o.
inline std::array<Operand, 4> operands(FeatureParams const& p) {
  return {{{"q", p.q, p.q_stride, p.seqlen_q, p.num_heads},
           {"k", p.k, p.k_stride, p.seqlen_k, p.num_heads_kv},
           {"v", p.v, p.v_stride, p.seqlen_k, p.num_heads_kv},
           {"o", p.o, p.o_stride, p.seqlen_q, p.num_heads}}};
}

/// Throws where an operand of `batch` entries isn't aligned to so many bytes.
void check_aligned(Row const& row, Operand const& x, int batch, int bytes, int element_bytes);

struct Given {
  char const* name;
  bool given;
};
/// Throws for what is given.
void refuse(Row const& row, std::initializer_list<Given> features);

/// Throws for a feature that neither plain nor wide rows know: all but a right limit of the window, a bias, and where
/// sequences are.
void refuse_features(Row const& row, FeatureParams const& p);

}  // namespace cutlass_fmha
