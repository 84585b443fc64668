// A wide row: a main loop of our own (whole_rows.cuh, wide_heads.cuh), or the attention of CUTLASS's example 41, a
// block of queries that meets all keys (Rabe and Staats 2021), between a beginning and an end of ours. The example
// finds its pointers from a layout that knows neither GQA nor lengths on the device, writes LSE in padded rows, and
// takes for granted that a query sees a key: we say where everything is, write LSE, and clear what sees nothing.
#pragma once

#include "example_passes.cuh"

#include <kernel_forward.h>  // of the example

#include "config.h"
#include "lane_scores.cuh"
#include "score_scale.cuh"
#include "tile.h"
#include "whole_rows.cuh"
#include "wide_heads.cuh"

namespace cutlass_fmha {

/// For the example, float32 on Sm75 means FMAs, and on Sm80 three TF32 products. A bias costs little, and with one the
/// scale is applied before masks, so that 0 and negative ones are right.
template <WideConfig C>
using ExampleAttention =
    AttentionKernel<typename WideScalar<C.dtype>::type,
                    std::conditional_t<C.mma == MmaKind::simt, cutlass::arch::Sm75, cutlass::arch::Sm80>,
                    /*aligned=*/true, C.tile_m, C.tile_n, C.head_dim, /*dropout=*/false, /*bias=*/true>;

/// Parameters live in shared memory: in registers, they would be spilled. The example's storage comes first, where it
/// looks for it.
template <WideConfig C>
struct ExampleStorage {
  typename ExampleAttention<C>::SharedStorage example;
  typename ExampleAttention<C>::Params params;
  WideTile tile;
};

template <WideConfig C>
constexpr void check_example() {
  using Attention = ExampleAttention<C>;
  static_assert(Attention::kNumThreads == C.threads());
  static_assert(std::is_same_v<typename Attention::MM0::Mma::FragmentC, cutlass::Array<float, kScoresPerThread>>);
  // Where a step's keys are not all in shared memory at a time and O is in registers, the example's loop over V ends
  // with copies of zeros that nobody waits for, into shared memory where the next step puts Q and K.
  static_assert(Attention::MM1::Mma::kSmemContainsEntireB || C.mma == MmaKind::simt || C.accumulates());
  static_assert(C.warps <= 8, "with 16 warps the example writes other rows of O than it should");
  static_assert(Attention::kKeepOutputInRF == !C.accumulates());
}

/// What the example reads in place of its own Params::advance_to_block().
template <WideConfig C>
__device__ typename ExampleAttention<C>::Params block_params(FeatureParams const& p, WideTile const& t) {
  using Attention = ExampleAttention<C>;
  using Scalar = typename Attention::scalar_t;
  // The example counts queries from blockIdx.x * tile_m, in 32 bits without a sign. Since blocks are not numbered like
  // tiles here, what depends on it is moved back by as much.
  uint32_t const counted = blockIdx.x * C.tile_m;
  RowPlace const q = query_rows(p, t, p.q_stride), o = query_rows(p, t, p.o_stride), sums = accumulator_rows(p, t);

  typename Attention::Params a;
  a.query_ptr = static_cast<Scalar*>(const_cast<void*>(p.q)) + q[t.first];
  a.key_ptr = static_cast<Scalar*>(const_cast<void*>(p.k)) + first_key(p, t, p.k_stride);
  a.value_ptr = static_cast<Scalar*>(const_cast<void*>(p.v)) + first_key(p, t, p.v_stride);
  a.output_ptr = static_cast<Scalar*>(p.o) + o[t.first];
  a.output_accum_ptr = p.partial_o != nullptr ? p.partial_o + sums[t.first] : reinterpret_cast<float*>(a.output_ptr);
  a.q_strideM = static_cast<int32_t>(q.step);
  a.k_strideM = static_cast<int32_t>(p.k_stride.seqlen);
  a.v_strideM = static_cast<int32_t>(p.v_stride.seqlen);
  a.o_strideM = static_cast<int32_t>(o.step);
  a.num_heads = p.pack == 1 ? p.num_heads : 1;  // rows of the accumulators are num_heads * head_dim_v apart
  if (p.bias != nullptr) {
    RowPlace const bias = bias_rows(p, t);
    a.bias_strideM = static_cast<int32_t>(bias.step);
    int64_t const moved = counted * static_cast<uint32_t>(a.bias_strideM);
    a.attn_bias_ptr = static_cast<Scalar*>(const_cast<void*>(p.bias)) + (bias[t.first] - moved);
  }
  a.scale = p.scale;
  a.head_dim = p.head_dim;
  a.head_dim_value = p.head_dim_v;
  a.num_queries = t.rows;
  a.num_keys = t.keys;
  if (t.diagonal != kNoDiagonal) {
    a.custom_mask_type = Attention::CausalFromTopLeft;
    a.causal_diagonal_offset = static_cast<uint32_t>(t.first + t.diagonal) - counted;
  }
  return a;
}

/// A row that sees no key: O = 0. For a whole warp.
template <class Scalar>
__device__ void clear_row(FeatureParams const& p, WideTile const& t, int row) {
  Scalar* const o = static_cast<Scalar*>(p.o) + query_rows(p, t, p.o_stride)[row];
  for (int d = threadIdx.x; d < p.head_dim_v; d += 32) o[d] = Scalar{};
}

__device__ inline void write_lse(FeatureParams const& p, WideTile const& t, int row, float lse) {
  if (p.lse != nullptr && threadIdx.x == 0) p.lse[lse_rows(p, t)[row]] = lse;
}

/// LSE of the rows that the example computed. Where its sum is 0, a mask or keys of -inf hid everything, and it has
/// divided 0 by 0.
template <WideConfig C>
__device__ void end_rows(FeatureParams const& p, ExampleStorage<C> const& shared) {
  using Scalar = typename ExampleAttention<C>::scalar_t;
  for (int row = threadIdx.y; row < shared.tile.rows; row += C.warps) {
    float const sum = shared.example.s_prime[row];
    write_lse(p, shared.tile, shared.tile.first + row, natural_lse(shared.example.mi[row], sum));
    if (sum == 0.f) clear_row<Scalar>(p, shared.tile, shared.tile.first + row);
  }
}

/// Rows of the block that see no key.
template <WideConfig C>
__device__ void clear_rows(FeatureParams const& p, WideTile const& tile) {
  for (int row = tile.begin + threadIdx.y; row < tile.end; row += C.warps) {
    if (!tile.clears(row)) continue;
    clear_row<typename WideScalar<C.dtype>::type>(p, tile, row);
    write_lse(p, tile, row, -INFINITY);
  }
}

template <WideConfig C>
__device__ void run_example(FeatureParams const& p, ExampleStorage<C>& shared) {
  if (threadIdx.x == 0 && threadIdx.y == 0) shared.params = block_params<C>(p, shared.tile);
  __syncthreads();
  ExampleAttention<C>::attention_kernel(shared.params);
  __syncthreads();  // O is written, by whichever thread
  end_rows<C>(p, shared);
}

/// A row's shared memory: ExampleStorage, WholeRowsStorage or WideHeadsStorage.
template <WideConfig C>
constexpr auto* wide_storage() {
  using Scalar = typename WideScalar<C.dtype>::type;
  if constexpr (C.whole_rows()) {
    return static_cast<WholeRowsStorage<C>*>(nullptr);
  } else if constexpr (C.wide_heads()) {
    return static_cast<WideHeadsStorage<C, Scalar>*>(nullptr);
  } else {
    return static_cast<ExampleStorage<C>*>(nullptr);
  }
}

template <WideConfig C>
__device__ void wide(FeatureParams const& p) {
  using Scalar = typename WideScalar<C.dtype>::type;
  extern __shared__ char smem_buffer[];  // by the example's own name and type: it is the same
  auto& shared = *reinterpret_cast<decltype(wide_storage<C>())>(smem_buffer);
  if (threadIdx.x == 0 && threadIdx.y == 0) {
    shared.tile = wide_tile(p, C.tile_m, blockIdx.x);
    if constexpr (!C.example()) {
      shared.first_key = first_key(p, shared.tile, p.k_stride);
      shared.first_value = first_key(p, shared.tile, p.v_stride);
    }
  }
  __syncthreads();
  clear_rows<C>(p, shared.tile);
  if (shared.tile.rows == 0) return;
  if constexpr (C.whole_rows()) {
    WholeRows<C> rows{p, shared};
    rows.run();
    rows.write();
  } else if constexpr (C.wide_heads()) {
    WideHeads<C, Scalar> heads{p, shared};
    heads.run();
    heads.write();
  } else {
    run_example<C>(p, shared);
  }
}

template <WideConfig C>
constexpr int wide_smem_bytes() {
  if constexpr (C.example()) check_example<C>();
  return sizeof(*wide_storage<C>());
}

}  // namespace cutlass_fmha
