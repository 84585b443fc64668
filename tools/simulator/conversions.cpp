// cvt: from one type of number to another. Registers may be wider than the numbers in them.
#include <algorithm>
#include <cmath>

#include "floats.h"
#include "opcodes.h"

namespace simulator {
namespace {

// ---- between integers ----------------------------------------------------------------------------------------------

struct IntegerType {
  char const* name;
  Lanes<int64_t> (*read)(Warp& w, uint32_t place, int bits);
  void (*write)(Warp& w, uint32_t place, int bits, Lanes<int64_t> const& value);
  int bits;
};

template <class T, class Register>
Lanes<int64_t> read_register(Warp& w, uint32_t place) {
  Lanes<int64_t> result;
  for (int lane = 0; lane < kLanes; ++lane) {
    result[lane] = static_cast<int64_t>(static_cast<T>(w.at<Register>(place)[lane]));
  }
  return result;
}

template <class T, class Register>
void write_register(Warp& w, uint32_t place, Lanes<int64_t> const& value) {
  Lanes<Register> result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = static_cast<Register>(static_cast<T>(value[lane]));
  w.write(place, result);
}

template <class T>
constexpr IntegerType integer_type(char const* name) {
  return {name,
          [](Warp& w, uint32_t place, int bits) {
            return bits == 16   ? read_register<T, uint16_t>(w, place)
                   : bits == 32 ? read_register<T, uint32_t>(w, place)
                                : read_register<T, uint64_t>(w, place);
          },
          [](Warp& w, uint32_t place, int bits, Lanes<int64_t> const& value) {
            if (bits == 16) write_register<T, uint16_t>(w, place, value);
            if (bits == 32) write_register<T, uint32_t>(w, place, value);
            if (bits == 64) write_register<T, uint64_t>(w, place, value);
          },
          8 * sizeof(T)};
}

constexpr IntegerType kIntegerTypes[] = {
    integer_type<int8_t>("s8"),    integer_type<uint8_t>("u8"),   integer_type<int16_t>("s16"),
    integer_type<uint16_t>("u16"), integer_type<int32_t>("s32"),  integer_type<uint32_t>("u32"),
    integer_type<int64_t>("s64"),  integer_type<uint64_t>("u64"),
};
constexpr uint32_t kTypes = std::size(kIntegerTypes);

void convert_integer(Warp& w, Instruction const& i) {
  Lanes<int64_t> const value = kIntegerTypes[i.number % kTypes].read(w, i.operand[1], i.bits[1]);
  kIntegerTypes[i.number / kTypes].write(w, i.operand[0], i.bits[0], value);
}

void add_integer_conversions(Opcodes& ops) {
  for (uint32_t to = 0; to < kTypes; ++to) {
    for (uint32_t from = 0; from < kTypes; ++from) {
      Slot result{.kind = Slot::Kind::out, .bits = kIntegerTypes[to].bits}, value{.bits = kIntegerTypes[from].bits};
      ops.add({std::string("cvt.") + kIntegerTypes[to].name + "." + kIntegerTypes[from].name}, convert_integer,
              {result.of_any_width(), value.of_any_width()}, to * kTypes + from);
    }
  }
}

// ---- floats ---------------------------------------------------------------------------------------------------------

uint32_t pair(uint16_t high, uint16_t low) { return uint32_t(high) << 16 | low; }

/// Rounded to nearest, ties away from zero, to 10 bits behind the point.
float to_tfloat32(float x) {
  if (!std::isfinite(x)) return canonical(x);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(x) + 0x1000) & ~0x1fffu);
}

/// Cut off, what there is no int for becomes the nearest; NaN 0.
int32_t to_int32(float x) {
  if (std::isnan(x)) return 0;
  return static_cast<int32_t>(std::clamp(double(x), -2147483648.0, 2147483647.0));
}

void add_float_conversions(Opcodes& ops) {
  add_elementwise<[](float x) { return to_tfloat32(x); }>(ops, {"cvt.rna.tf32.f32"});
  add_elementwise<[](float x) { return to_float16(x); }>(ops, {"cvt.rn.f16.f32"});
  add_elementwise<[](float x) { return to_bfloat16(x); }>(ops, {"cvt.rn.bf16.f32"});
  // The first operand becomes the upper half.
  add_elementwise<[](float a, float b) { return pair(to_float16(a), to_float16(b)); }>(ops, {"cvt.rn.f16x2.f32"});
  add_elementwise<[](float a, float b) { return pair(to_bfloat16(a), to_bfloat16(b)); }>(ops, {"cvt.rn.bf16x2.f32"});
  add_elementwise<[](uint32_t a, uint32_t b) {
    auto const product = [](uint32_t x, uint32_t y) {
      return to_bfloat16(from_bfloat16(uint16_t(x)) * from_bfloat16(uint16_t(y)));
    };
    return pair(product(a >> 16, b >> 16), product(a, b));
  }>(ops, {"mul.rn.bf16x2"});
  add_elementwise<[](uint16_t x) { return canonical(from_float16(x)); }>(ops, {"cvt.f32.f16"});
  add_elementwise<[](uint16_t x) { return canonical(from_bfloat16(x)); }>(ops, {"cvt.f32.bf16"});
  add_elementwise<[](int32_t x) { return static_cast<float>(x); }>(ops, {"cvt.rn.f32.s32"});
  add_elementwise<[](uint16_t x) { return static_cast<float>(x); }>(ops, {"cvt.rn.f32.u16"});
  add_elementwise<[](float x) { return std::nearbyint(x); }>(ops, {"cvt.rni.f32.f32"});
  add_elementwise<[](float x) { return to_int32(x); }>(ops, {"cvt.rzi.s32.f32", "cvt.rzi.ftz.s32.f32"});
  add_elementwise<[](float x) { return 0.f < x ? std::fmin(x, 1.f) : 0.f; }>(ops, {"cvt.sat.f32.f32"});
}

}  // namespace

void add_conversions(Opcodes& ops) {
  add_integer_conversions(ops);
  add_float_conversions(ops);
}

}  // namespace simulator
