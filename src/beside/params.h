// What the kernels read that normalise rows and multiply gated units. Host code, no CUDA needed. Rows have up to three
// leading dimensions, of `sizes`; strides are in elements, and the last dimension itself is contiguous everywhere.
#pragma once

#include <cstdint>

#include "../config.h"
#include "../divisor.h"
#include "../host_device.h"
#include "../params.h"

namespace cutlass_fmha {

/// Rows of `dim` elements.
struct RowsParams {
  int64_t sizes[3];  ///< leading dimensions, ones in front
  int dim;

  // Set by launch().
  int rows;
  int early;                    ///< blocks that may be there while the kernel ahead in the stream runs
  bool alone;                   ///< each block has an SM of its own
  bool flat;                    ///< one leading dimension is all that counts: rows are their strides' `head` apart
  Divisor by_middle, by_inner;  ///< by sizes[1] and sizes[2]

  int64_t count() const { return sizes[0] * sizes[1] * sizes[2]; }
  bool empty() const { return count() == 0; }
};

/// How the lanes that share a row go through it.
enum class Walk : int {
  kept,      ///< whole rows in registers: each lane has up to `vectors` of 16 bytes
  vectors,   ///< rows that are longer, read twice
  elements,  ///< the same where something isn't aligned to 16 bytes
};

/// out = x rstd (weight + weight_offset) + bias of each row, with rstd = 1 / sqrt(mean(x^2) + eps).
struct RmsNormParams : RowsParams {
  static constexpr int kMaxThreads = 512, kVectors = 4;  ///< of a lane, of many rows; of few it has one

  void const* x;
  void const* residual;  ///< may be null; x + residual, rounded to x's type, takes the place of x
  void* sum;             ///< and is written here
  void const* weight;    ///< [dim]; may be null: 1
  void const* bias;      ///< [dim], of weight's type; may be null: 0
  void* out;
  float* rstd;  ///< of each row, contiguous; may be null
  Strides x_stride, residual_stride, sum_stride, out_stride;
  float eps, weight_offset;
  DType out_type;     ///< x's or float32, of a float32 x any
  DType weight_type;  ///< x's or float32

  // Set by launch().
  Walk walk;
  bool many;  ///< rows: a lane has kVectors
  int lanes_log2;
  float per_dim;  ///< 1 / dim
};

/// With g = dout (weight + weight_offset) and y = x rstd: dx = rstd (g - y mean(g y)) + dsum, dweight = sum over rows
/// of dout y, whose terms are added in a fixed order: thread blocks leave partial sums, which a second kernel adds up;
/// or, of few rows, blocks beside those of dx add up columns.
struct RmsNormBackwardParams : RowsParams {
  static constexpr int kThreads = 512, kVectors = 2;  ///< vectors of a lane at most
  static constexpr int kColumns = 32;                 ///< of dweight, that a block of the second kernel adds up
  static constexpr int kColumnsBeside = 128;          ///< and a block beside those of dx; of elements kColumns

  void const* dout;
  void const* dsum;  ///< gradient of the sum, of x's type; may be null
  void const* x;     ///< what was normalised
  void const* weight;
  float const* rstd;
  void* dx;
  void* dweight;   ///< [dim], of weight's type; null: nobody wants it
  float* partial;  ///< partial_floats() of them where dweight is wanted, aligned to 16 bytes
  Strides dout_stride, dsum_stride, x_stride, dx_stride;
  float weight_offset;
  DType out_type, weight_type;
  int parts;  ///< thread blocks that the GPU has room for at once; partial sums of dweight at most

  // Set by launch().
  Walk walk;
  bool once;                   ///< a group of lanes has one row at most, and its block no partial sum
  int lanes_log2, row_blocks;  ///< blocks of dx, which come first
  int stages;                  ///< rows of a group of lanes that are on their way at once
  float per_dim;

  /// From one partial sum to the next.
  FMHA_HOST_DEVICE int64_t pitch() const { return (int64_t(dim) + 3) / 4 * 4; }
  int64_t partial_floats() const { return parts * pitch(); }
};

enum class Activation : int { silu, gelu, gelu_tanh };
constexpr char const* name_of(Activation activation) {
  constexpr char const* kNames[] = {"silu", "gelu", "gelu_tanh"};
  return kNames[int(activation)];
}

/// out = activation(gate) up
struct GatedParams : RowsParams {
  static constexpr int kVectors = 1, kElements = 4;  ///< of a thread, where there are vectors or not

  void const* gate;
  void const* up;
  void* out;
  Strides gate_stride, up_stride, out_stride;
  Activation activation;

  // Set by launch().
  bool aligned;
  int chunks;  ///< vectors or elements of a row
  Divisor by_chunks;
};

/// dgate = dout up activation'(gate), dup = dout activation(gate); out, where it isn't null, is computed again.
struct GatedBackwardParams : GatedParams {
  void const* dout;
  void* dgate;
  void* dup;
  Strides dout_stride, dgate_stride, dup_stride;
};

/// Throw std::invalid_argument for numbers that contradict each other.
void check(RmsNormParams const& p);
void check(RmsNormBackwardParams const& p);
void check(GatedParams const& p);
void check(GatedBackwardParams const& p);

}  // namespace cutlass_fmha
