// cvt: from one type of number to another. Registers may be wider than the numbers in them.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "opcodes.h"

namespace simulator {
namespace {

template <class To, class From>
void convert_integer(Warp& w, Instruction const& i) {
  for_lanes(w.active, [&](int lane) {
    auto const value = static_cast<From>(w.get(i.operand[1], i.bits[1], lane));
    w.put(i.operand[0], i.bits[0], lane, static_cast<To>(value));
  });
}

template <class To, class... From>
void add_conversions_to(Opcodes& ops) {
  (ops.add({"cvt." + type_name<To>() + "." + type_name<From>()}, convert_integer<To, From>,
           {out<To>().of_any_width(), in<From>().of_any_width()}),
   ...);
}

template <class... T>
void add_integer_conversions(Opcodes& ops) {
  (add_conversions_to<T, T...>(ops), ...);
}

uint16_t bfloat16_product(uint16_t a, uint16_t b) { return to_bfloat16(from_bfloat16(a) * from_bfloat16(b)); }
uint32_t pair(uint16_t high, uint16_t low) { return uint32_t(high) << 16 | low; }

/// Cut off, what there is no int for becomes the nearest; NaN 0.
int32_t to_int32(float x) {
  if (std::isnan(x)) return 0;
  return static_cast<int32_t>(std::clamp(double(x), -2147483648.0, 2147483647.0));
}

}  // namespace

void add_conversions(Opcodes& ops) {
  add_integer_conversions<int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, int64_t, uint64_t>(ops);
  add_elementwise<[](float x) { return to_float16(x); }>(ops, {"cvt.rn.f16.f32"});
  add_elementwise<[](float x) { return to_bfloat16(x); }>(ops, {"cvt.rn.bf16.f32"});
  // The first operand becomes the upper half.
  add_elementwise<[](float a, float b) { return pair(to_float16(a), to_float16(b)); }>(ops, {"cvt.rn.f16x2.f32"});
  add_elementwise<[](float a, float b) { return pair(to_bfloat16(a), to_bfloat16(b)); }>(ops, {"cvt.rn.bf16x2.f32"});
  add_elementwise<[](uint32_t a, uint32_t b) {
    return pair(bfloat16_product(a >> 16, b >> 16), bfloat16_product(a, b));
  }>(ops, {"mul.rn.bf16x2"});
  add_elementwise<[](uint16_t x) { return canonical(from_float16(x)); }>(ops, {"cvt.f32.f16"});
  add_elementwise<[](uint16_t x) { return canonical(from_bfloat16(x)); }>(ops, {"cvt.f32.bf16"});
  add_elementwise<[](int32_t x) { return static_cast<float>(x); }>(ops, {"cvt.rn.f32.s32"});
  add_elementwise<[](uint16_t x) { return static_cast<float>(x); }>(ops, {"cvt.rn.f32.u16"});
  add_elementwise<[](float x) { return std::nearbyint(x); }>(ops, {"cvt.rni.f32.f32"});
  add_elementwise<[](float x) { return to_int32(x); }>(ops, {"cvt.rzi.s32.f32"});
  add_elementwise<[](float x) { return 0.f < x ? std::fmin(x, 1.f) : 0.f; }>(ops, {"cvt.sat.f32.f32"});
}

}  // namespace simulator
