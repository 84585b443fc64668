#include "tensor_map.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstring>
#include <stdexcept>
#include <string>

namespace cutlass_fmha {
namespace {

static_assert(sizeof(TensorMap) == sizeof(CUtensorMap) && alignof(TensorMap) >= alignof(CUtensorMap));

using Encode = decltype(&cuTensorMapEncodeTiled);

/// From the driver that is loaded anyway: linking against it would keep the module from importing without a driver.
Encode encode_function() {
  static Encode const function = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result{};
    cudaError_t const status =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &result);
    if (status != cudaSuccess || result != cudaDriverEntryPointSuccess || symbol == nullptr) {
      cudaGetLastError();  // leave no error behind for the next caller
      throw std::runtime_error("the CUDA driver has no cuTensorMapEncodeTiled, which rows that copy by TMA need");
    }
    return reinterpret_cast<Encode>(symbol);
  }();
  return function;
}

/// What a descriptor describes: everything but the kind of box, which follows from row_dim, the head dim of the row.
struct Key {
  void const* tensor;
  int64_t batch_stride, seqlen_stride, head_stride;
  int batch, seqlen, heads, head_dim, row_dim, tile_rows, dtype, unused;

  bool operator==(Key const& other) const { return std::memcmp(this, &other, sizeof(Key)) == 0; }
  size_t slot(size_t slots) const {
    uint64_t hash = 0;
    uint64_t words[sizeof(Key) / sizeof(uint64_t)];
    std::memcpy(words, this, sizeof(words));
    for (uint64_t word : words) hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    return size_t(hash >> 32) % slots;
  }
};
static_assert(std::has_unique_object_representations_v<Key>, "compared byte by byte");

TensorMap encode(Key const& key) {
  int const bytes = bytes_of(DType(key.dtype));
  // The panels of the shared-memory tile, see Panels: their rows are as long as the swizzle's span.
  bool const wide = key.row_dim * bytes % 128 == 0;
  cuuint64_t const extents[] = {cuuint64_t(key.head_dim), cuuint64_t(key.seqlen), cuuint64_t(key.heads),
                                cuuint64_t(key.batch)};
  cuuint64_t const strides[] = {cuuint64_t(key.seqlen_stride) * bytes, cuuint64_t(key.head_stride) * bytes,
                                cuuint64_t(key.batch_stride) * bytes};
  cuuint32_t const box[] = {cuuint32_t((wide ? 128 : 64) / bytes), cuuint32_t(key.tile_rows), 1, 1};
  cuuint32_t const element_strides[] = {1, 1, 1, 1};
  CUtensorMap map;
  CUresult const status = encode_function()(
      &map, DType(key.dtype) == DType::float16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4,
      const_cast<void*>(key.tensor), extents, strides, box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
      wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("the CUDA driver refused to describe a tensor of shape [" + std::to_string(key.batch) +
                             ", " + std::to_string(key.seqlen) + ", " + std::to_string(key.heads) + ", " +
                             std::to_string(key.head_dim) + "] and strides [" + std::to_string(key.batch_stride) +
                             ", " + std::to_string(key.seqlen_stride) + ", " + std::to_string(key.head_stride) +
                             ", 1] for TMA: CUresult " + std::to_string(int(status)));
  }
  TensorMap result;
  std::memcpy(&result, &map, sizeof(result));
  return result;
}

/// Encoding takes longer than the rest of a launch, and callers come back with the same tensors.
TensorMap const& cached(Key const& key) {
  struct Entry {
    Key key{};
    TensorMap map{};
  };
  thread_local std::array<Entry, 64> entries;
  Entry& entry = entries[key.slot(entries.size())];
  if (!(entry.key == key)) {
    entry.map = encode(key);
    entry.key = key;
  }
  return entry.map;
}

struct Shape {
  int batch, seqlen, heads;
  int head_dim, row_dim;  ///< the tensor's, and that of the row, whose rest is read as zeros
};

TensorMap const& describe(void const* tensor, Strides const& strides, Shape const& shape, int box_rows,
                          TileConfig const& config) {
  // The stride of a dimension with one element may be anything, and TMA wants multiples of 16 bytes.
  int64_t const unused = 16 / config.element_bytes();
  auto const stride = [=](int64_t value, int extent) { return extent > 1 ? value : unused; };
  return cached({tensor, stride(strides.batch, shape.batch), stride(strides.seqlen, shape.seqlen),
                 stride(strides.head, shape.heads), shape.batch, shape.seqlen, shape.heads, shape.head_dim,
                 shape.row_dim, box_rows, int(config.dtype), 0});
}

}  // namespace

void set_tensor_maps(ForwardTmaParams& p, ForwardConfig const& config) {
  Shape const queries{p.batch, p.seqlen_q, p.num_heads, config.head_dim, config.head_dim};
  Shape const keys{p.batch, p.seqlen_k, p.num_heads_kv, config.head_dim, config.head_dim};
  p.o_map = describe(p.o, p.o_stride, queries, config.rows_per_warp(), config);
  if (p.seqlen_k == 0) return;  // nothing is read then, and an empty tensor can't be described
  p.q_map = describe(p.q, p.q_stride, queries, config.tile_m, config);
  p.k_map = describe(p.k, p.k_stride, keys, config.tile_n, config);
  p.v_map = describe(p.v, p.v_stride, keys, config.tile_n, config);
}

void set_tensor_maps(FeatureTmaParams& p, ForwardConfig const& config) {
  if (p.entries_k == 0 || p.rows_k == 0) return;
  int const box = p.keys_stand == KeysStand::page_runs ? kPageRun : config.tile_n;
  Shape const keys{p.entries_k, p.rows_k, p.num_heads_kv, p.head_dim, config.head_dim};
  Shape const values{p.entries_k, p.rows_k, p.num_heads_kv, p.head_dim_v, config.head_dim_v()};
  p.k_map = describe(p.k, p.k_stride, keys, box, config);
  p.v_map = describe(p.v, p.v_stride, values, box, config);
}

void set_tensor_maps(BackwardTmaParams& p, BackwardConfig const& config) {
  // Packed sequences are one entry, with the rows of all.
  bool const packed = p.cu_seqlens_q != nullptr;
  int const entries = packed ? 1 : p.batch, rows = packed ? int(p.lse_head_stride) : p.seqlen_q;
  Shape const queries{entries, rows, p.num_heads, p.head_dim, config.head_dim};
  Shape const outputs{entries, rows, p.num_heads, p.head_dim_v, config.head_dim};
  if (rows == 0) return;
  p.q_map = describe(p.q, p.q_stride, queries, config.unit(), config);
  p.dout_map = describe(p.dout, p.dout_stride, outputs, config.unit(), config);
}

}  // namespace cutlass_fmha
