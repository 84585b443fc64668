// The Python side of what a launch of attention is asked: _C.AttentionParams, whose fields are those of
// attention_params.h. A kernel believes what it is given: everything that sizes, strides and flags could contradict
// each other in is refused here, and in launch.h what a row can't take.
#include <climits>
#include <string>

#include "attention_params.h"
#include "binding.h"
#include "fields.h"
#include "helpers/params.h"

namespace py = pybind11;

namespace cutlass_fmha {
namespace {

using Class = py::class_<AttentionParams>;

constexpr int64_t kMaxSize = kMaxSeqlen;
constexpr int64_t kMaxPackedRows = int64_t{1} << 30;  // row numbers, those that pad the last tile too, fit an int
constexpr double kMaxScale = 2e38;
constexpr int kPageUnit = 16;  // keys that a thread finds on one page

AttentionParams nothing_asked() {
  AttentionParams p{};
  p.window_left = p.window_right = -1;
  p.scale = p.dropout_scale = 1.f;
  p.pack = p.splits = 1;
  return p;
}

// ---- fields ------------------------------------------------------------------------------------------------

/// An integer that others are divided by; 0 where nothing is.
void number_and_divisor(Class& c, char const* name, int FeatureParams::* field, Divisor FeatureParams::* divisor,
                        int64_t least) {
  c.def_property(
      name, [=](AttentionParams const& p) { return p.*field; },
      [=](AttentionParams& p, int64_t value) {
        require_range(name, value, least, kMaxSize);
        p.*field = static_cast<int>(value);
        p.*divisor = value > 0 ? Divisor(static_cast<int>(value)) : Divisor();
      });
}

float finite(char const* name, double value, double least, double most) {
  require(value >= least && value <= most, [&] {
    return std::string(name) + " must be a finite number" + (least < 0 ? "" : " from 0 on") + " of at most 2e38, got " +
           std::to_string(value);
  });
  return static_cast<float>(value);
}

/// A float of at most `most` in magnitude.
void real(Class& c, char const* name, float FeatureParams::* field, double least, double most) {
  c.def_property(
      name, [field](AttentionParams const& p) { return p.*field; },
      [=](AttentionParams& p, double value) { p.*field = finite(name, value, least, most); });
}

char const* const kBiasTypes[] = {"none", "same_as_q", "float32"};

void bias_type(Class& c) {
  c.def_property(
      "bias_type", [](AttentionParams const& p) { return kBiasTypes[static_cast<int>(p.bias_type)]; },
      [](AttentionParams& p, std::string const& name) {
        for (int i = 0; i < 3; ++i) {
          if (name == kBiasTypes[i]) {
            p.bias_type = static_cast<BiasType>(i);
            return;
          }
        }
        throw std::invalid_argument("bias_type must be none, same_as_q or float32, got " + name);
      });
}

/// Calls `visit` with the name of each address and its member.
template <class Visit>
void each_address(Visit const& visit) {
  using P = AttentionParams;
  visit("q", &P::q);
  visit("k", &P::k);
  visit("v", &P::v);
  visit("o", &P::o);
  visit("lse", &P::lse);
  visit("cu_seqlens_q", &P::cu_seqlens_q);
  visit("cu_seqlens_k", &P::cu_seqlens_k);
  visit("seqused_q", &P::seqused_q);
  visit("seqused_k", &P::seqused_k);
  visit("leftpad_k", &P::leftpad_k);
  visit("batch_index_k", &P::batch_index_k);
  visit("page_table", &P::page_table);
  visit("prefix_lengths", &P::prefix_lengths);
  visit("mask", &P::mask);
  visit("mask_bits", &P::mask_bits);
  visit("block_counts", &P::block_counts);
  visit("block_indices", &P::block_indices);
  visit("bias", &P::bias);
  visit("alibi_slopes", &P::alibi_slopes);
  visit("sinks", &P::sinks);
  visit("dropout_seed", &P::dropout_seed);
  visit("partial_o", &P::partial_o);
  visit("partial_lse", &P::partial_lse);
  visit("partial_low", &P::partial_low);
  visit("tail", &P::tail);
}

void bind_strides(Class& c) {
  using P = AttentionParams;
  strides<3>(c, "q_stride", &P::q_stride);
  strides<3>(c, "k_stride", &P::k_stride);
  strides<3>(c, "v_stride", &P::v_stride);
  strides<3>(c, "o_stride", &P::o_stride);
  strides<4>(c, "mask_stride", &P::mask_stride);
  strides<4>(c, "bias_stride", &P::bias_stride);
  strides<4>(c, "block_stride", &P::block_stride);
  strides<3>(c, "count_stride", &P::count_stride);
  strides<2>(c, "alibi_stride", &P::alibi_stride);
  for (auto const& [name, field] :
       {std::pair{"page_table_stride", &P::page_table_stride}, std::pair{"lse_batch_stride", &P::lse_batch_stride},
        std::pair{"lse_head_stride", &P::lse_head_stride}, std::pair{"lse_rows", &P::lse_rows}}) {
    stride(c, name, field);
  }
}

void bind_numbers(Class& c) {
  using P = AttentionParams;
  for (auto const& [name, field] :
       {std::pair{"batch", &P::batch}, std::pair{"num_heads", &P::num_heads},
        std::pair{"num_heads_kv", &P::num_heads_kv}, std::pair{"seqlen_q", &P::seqlen_q},
        std::pair{"seqlen_k", &P::seqlen_k}, std::pair{"entries_k", &P::entries_k}, std::pair{"rows_k", &P::rows_k},
        std::pair{"block_m", &P::block_m}, std::pair{"block_n", &P::block_n}}) {
    number(c, name, field, 0, kMaxSize);
  }
  number(c, "head_dim", &P::head_dim, 1, kMaxSize);
  number(c, "head_dim_v", &P::head_dim_v, 1, kMaxSize);
  number_and_divisor(c, "page_size", &P::page_size, &P::by_page_size, 0);
  number_and_divisor(c, "pack", &P::pack, &P::by_pack, 1);
  number(c, "splits", &P::splits, 1, CombineParams::kMaxSplits);
  number(c, "window_left", &P::window_left, -1, kMaxSize);
  number(c, "window_right", &P::window_right, -1, kMaxSize);
  for (auto const& [name, field] : {std::pair{"tail_tiles", &P::tail_tiles}, std::pair{"tail_parts", &P::tail_parts},
                                    std::pair{"tail_first", &P::tail_first}, std::pair{"tail_rest", &P::tail_rest}}) {
    number(c, name, field, 0, kMaxSize);
  }
  number(c, "dropout_threshold", &P::dropout_threshold, 0, 65535);
  c.def_readwrite("bottom_right", &P::bottom_right);
  c.def_readwrite("packs_mask", &P::packs_mask);
  real(c, "scale", &P::scale, -kMaxScale, kMaxScale);
  real(c, "softcap", &P::softcap, 0, kMaxScale);
  real(c, "dropout_scale", &P::dropout_scale, 0, kMaxScale);
  bias_type(c);
}

// ---- checks ------------------------------------------------------------------------------------------------

/// Every address is one of the type that it says.
void check_addresses(FeatureParams const& p, int element_bytes) {
  struct Address {
    char const* name;
    void const* value;
    int bytes;
  };
  for (Address const& a : {Address{"q", p.q, element_bytes},
                           {"k", p.k, element_bytes},
                           {"v", p.v, element_bytes},
                           {"o", p.o, element_bytes},
                           {"lse", p.lse, 4},
                           {"cu_seqlens_q", p.cu_seqlens_q, 4},
                           {"cu_seqlens_k", p.cu_seqlens_k, 4},
                           {"seqused_q", p.seqused_q, 4},
                           {"seqused_k", p.seqused_k, 4},
                           {"leftpad_k", p.leftpad_k, 4},
                           {"batch_index_k", p.batch_index_k, 4},
                           {"page_table", p.page_table, 4},
                           {"prefix_lengths", p.prefix_lengths, 4},
                           {"block_counts", p.block_counts, 4},
                           {"block_indices", p.block_indices, 4},
                           {"bias", p.bias, p.bias_type == BiasType::float32 ? 4 : element_bytes},
                           {"alibi_slopes", p.alibi_slopes, 4},
                           {"sinks", p.sinks, 4},
                           {"dropout_seed", p.dropout_seed, 8},
                           {"partial_o", p.partial_o, 16},
                           {"partial_lse", p.partial_lse, 4},
                           {"partial_low", p.partial_low, 4}}) {
    require(reinterpret_cast<uintptr_t>(a.value) % a.bytes == 0,
            [&] { return std::string(a.name) + " must be aligned to " + std::to_string(a.bytes) + " bytes"; });
  }
  bool const queries = p.batch > 0 && p.num_heads > 0 && p.seqlen_q > 0;
  require(!queries || (p.q && p.o), [] { return "q and o must be addresses"; });
  require(!queries || p.seqlen_k == 0 || (p.k && p.v), [] { return "k and v must be addresses"; });
}

void check_sizes(FeatureParams const& p) {
  auto const text = [](int64_t value) { return std::to_string(value); };
  require(p.head_dim > 0 && p.head_dim_v > 0, [] { return "head_dim and head_dim_v must be set"; });
  require(p.num_heads_kv > 0 ? p.num_heads % p.num_heads_kv == 0 : p.num_heads == 0, [&] {
    return "num_heads (" + text(p.num_heads) + ") must be a multiple of num_heads_kv (" + text(p.num_heads_kv) + ")";
  });
  require(p.pack == 1 || (p.num_heads > 0 && p.pack == p.num_heads / p.num_heads_kv), [&] {
    return "pack must be 1 or num_heads / num_heads_kv, got " + text(p.pack) + " with " + text(p.num_heads) + " and " +
           text(p.num_heads_kv) + " heads";
  });
  require(int64_t{p.seqlen_q} * p.pack <= kMaxPackedRows, [&] {
    return "seqlen_q times pack must be at most 2**30, got " + text(p.seqlen_q) + " times " + text(p.pack);
  });
}

/// Where the rows of k and v lie.
void check_keys(FeatureParams const& p) {
  require((p.page_table != nullptr) == (p.page_size > 0), [] { return "page_table and page_size go together"; });
  require(p.page_size % kPageUnit == 0,
          [&] { return "page_size must be a multiple of 16, got " + std::to_string(p.page_size); });
  require(!p.page_table || (!p.cu_seqlens_k && !p.batch_index_k),
          [] { return "pages go neither with cu_seqlens_k nor with batch_index_k"; });
  require(!p.cu_seqlens_k || !p.batch_index_k, [] { return "cu_seqlens_k and batch_index_k don't go together"; });
}

void check_features(FeatureParams const& p) {
  require((p.bias_type == BiasType::none) == (p.bias == nullptr), [] { return "bias and bias_type go together"; });
  require(p.dropout_threshold == 0 || p.dropout_seed, [] { return "dropout needs dropout_seed"; });
  require(!p.block_counts == !p.block_indices, [] { return "block_counts and block_indices go together"; });
  require(!p.block_counts || (p.block_m > 0 && p.block_n > 0), [] { return "a block mask needs block_m and block_n"; });
  require(!p.block_counts || p.pack == 1, [] { return "heads can't be packed under a block mask: pack must be 1"; });
}

/// LSE and the parts of split keys: a row of each query and head, none beyond lse_rows.
void check_rows(FeatureParams const& p) {
  if ((p.splits == 1 && !p.lse) || p.batch == 0 || p.num_heads == 0 || p.seqlen_q == 0) return;
  require(p.splits == 1 || (p.partial_o && p.partial_lse && p.partial_low),
          [] { return "splits need partial_o, partial_lse and partial_low"; });
  // With cu_seqlens_q a head's rows are all sequences': where they end is on the device.
  __int128 const last =
      __int128{p.num_heads - 1} * p.lse_head_stride +
      (p.cu_seqlens_q ? __int128{p.lse_head_stride} : __int128{p.batch - 1} * p.lse_batch_stride + p.seqlen_q);
  require(last <= p.lse_rows, [&] {
    return "lse_rows (" + std::to_string(p.lse_rows) + ") must hold the rows that lse_batch_stride and " +
           "lse_head_stride name";
  });
  require(!p.cu_seqlens_q || p.lse_batch_stride == 0,
          [] { return "with cu_seqlens_q, lse_batch_stride must be 0: [num_heads, total_q]"; });
}

}  // namespace

AttentionParams of_call(AttentionParams const& plan, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t o, uintptr_t lse,
                        double scale, uintptr_t room) {
  AttentionParams p = plan;
  p.q = reinterpret_cast<void const*>(q);
  p.k = reinterpret_cast<void const*>(k);
  p.v = reinterpret_cast<void const*>(v);
  p.o = reinterpret_cast<void*>(o);
  p.lse = reinterpret_cast<float*>(lse);
  p.scale = finite("scale", scale, -kMaxScale, kMaxScale);
  auto* const parts = reinterpret_cast<float*>(room);
  if (!parts) return p;
  if (p.packs_mask) {
    p.mask_bits = reinterpret_cast<uint32_t*>(room);
  } else if (p.splits == 1) {
    p.tail = parts;
  } else {
    int64_t const rows = p.splits * p.lse_rows;
    p.partial_o = parts;
    p.partial_lse = parts + rows * p.head_dim_v;
    p.partial_low = p.partial_lse + rows;
  }
  return p;
}

SetAddress set_address(std::string const& name) {
  SetAddress found;
  each_address([&](char const* known, auto field) {
    if (name != known) return;
    found = [field](AttentionParams& p, uintptr_t value) {
      p.*field = reinterpret_cast<std::remove_reference_t<decltype(p.*field)>>(value);
    };
  });
  require(bool(found), [&] { return "no address is named " + name; });
  return found;
}

bool all_vectors(FeatureParams const& p, int element_bytes) {
  constexpr int kVectorBytes = 16;
  uintptr_t addresses = 0;
  for (void const* operand : {p.q, p.k, p.v, static_cast<void const*>(p.o)}) {
    addresses |= reinterpret_cast<uintptr_t>(operand);
  }
  int64_t elements = p.head_dim | p.head_dim_v;
  for (Strides const& s : {p.q_stride, p.k_stride, p.v_stride, p.o_stride}) elements |= s.batch | s.seqlen | s.head;
  return addresses % kVectorBytes == 0 && elements * element_bytes % kVectorBytes == 0;
}

bool device_lengths(FeatureParams const& p) {
  // sequence_at(), visible_keys() and whole_walk() read none of these.
  return p.cu_seqlens_q || p.cu_seqlens_k || p.seqused_q || p.seqused_k || p.leftpad_k || p.batch_index_k ||
         p.prefix_lengths || p.block_counts;
}

void check(AttentionParams const& p, int element_bytes) {
  check_sizes(p);
  check_addresses(p, element_bytes);
  check_keys(p);
  check_features(p);
  check_rows(p);
}

void bind_attention_params(py::module_& m) {
  auto params = params_class<AttentionParams>(m, "AttentionParams", &nothing_asked);
  params.def("of_call", &of_call, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("o"), py::arg("lse"),
             py::arg("scale"), py::arg("room") = 0);
  params.def(
      "vectors", [](AttentionParams const& p, int element_bytes) { return all_vectors(p, element_bytes); },
      py::arg("element_bytes"));
  params.def_property_readonly("device_lengths", [](AttentionParams const& p) { return device_lengths(p); });
  each_address([&](char const* name, auto field) { address(params, name, field); });
  bind_strides(params);
  bind_numbers(params);
}

}  // namespace cutlass_fmha
