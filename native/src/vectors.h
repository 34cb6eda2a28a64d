// Sixteen float32 numbers, whatever the width of the processor's registers: a sum over them has one order everywhere.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace machd {
// One namespace for each instruction set that the file is compiled for, so that the linker keeps all of them.
namespace MACHD_TARGET {

constexpr int kBlock = 16;  // numbers of a vector

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = kBlock / kLanes;

typedef float FloatPart __attribute__((vector_size(4 * kLanes)));
typedef uint32_t WordPart __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntPart __attribute__((vector_size(4 * kLanes)));
// In memory, where it may lie anywhere. Copied as bytes it would go through the stack in halves, each of which the processor waits for.
typedef float FloatPartInMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline FloatPart fused(FloatPart a, FloatPart b, FloatPart c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(__ARM_NEON)
  return vfmaq_f32(c, a, b);
#else
  FloatPart result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return result;
#endif
}

inline FloatPart part_at(const float* from) { return *reinterpret_cast<const FloatPartInMemory*>(from); }
inline void store(FloatPart part, float* to) { *reinterpret_cast<FloatPartInMemory*>(to) = part; }

struct Vector {
  FloatPart part[kParts];

  static Vector zeros() {
    Vector result;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) result.part[p] = FloatPart{};
    return result;
  }

  static Vector load(const float* from) {
    Vector result;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) result.part[p] = part_at(from + p * kLanes);
    return result;
  }

  // Zeros behind the first `count` numbers.
  static Vector load_some(const float* from, int count) {
    float padded[kBlock] = {};
    std::memcpy(padded, from, sizeof(float) * count);
    return load(padded);
  }

  static Vector all(float number) {
    Vector result;
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) result.part[p] = FloatPart{} + number;
    return result;
  }

  void store(float* to) const {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) machd::MACHD_TARGET::store(part[p], to + p * kLanes);
  }
  void store_some(float* to, int count) const { std::memcpy(to, this, sizeof(float) * count); }
};

// Calls what_of(part of one, part of the other, ..) for the parts of vectors.
template <class What, class... Vectors>
inline Vector by_part(What what, const Vectors&... vectors) {
  Vector result;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) result.part[p] = what(vectors.part[p]...);
  return result;
}

inline Vector operator+(Vector a, Vector b) { return by_part([](auto x, auto y) { return x + y; }, a, b); }
inline Vector operator-(Vector a, Vector b) { return by_part([](auto x, auto y) { return x - y; }, a, b); }
inline Vector operator*(Vector a, Vector b) { return by_part([](auto x, auto y) { return x * y; }, a, b); }
inline Vector operator/(Vector a, Vector b) { return by_part([](auto x, auto y) { return x / y; }, a, b); }

// The same numbers, loaded once: the compiler would load what is in memory again for each use.
inline Vector in_registers(Vector numbers) {
#if defined(__AVX512F__)
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) asm("" : "+v"(numbers.part[p]));
#endif
  return numbers;
}

// The larger one, lane by lane; the second one where the first is not a number.
inline Vector larger(Vector a, Vector b) { return by_part([](auto x, auto y) { return x > y ? x : y; }, a, b); }

// a * b + c, rounded once.
inline Vector fused(Vector a, Vector b, Vector c) {
  Vector result;
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) result.part[p] = fused(a.part[p], b.part[p], c.part[p]);
  return result;
}

// The sum of the sixteen numbers: the upper half is added to the lower one until one number is left.
inline float sum(Vector v) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v.part[0]), _mm512_extractf32x8_ps(v.part[0], 1));
#else
  const __m256 eight = _mm256_add_ps(v.part[0], v.part[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lanes[kBlock];
  v.store(lanes);
  for (int half = kBlock / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
#endif
}

// The largest of sixteen numbers; what is not a number may be left out.
inline float largest(Vector v) {
  float lanes[kBlock];
  v.store(lanes);
  for (int half = kBlock / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] > lanes[lane + half] ? lanes[lane] : lanes[lane + half];
  return lanes[0];
}

constexpr float kLog2E = 1.44269504088896341f;

// Two to the power of each number, by operations that are rounded alike on every processor; relative error under 2e-7. Powers beyond
// those of normal float32 are those of the nearest one; what is not a number stays so.
inline Vector exp2(Vector exponents) {
  // A polynomial of 2**f for f from -0.5 to 0.5, lowest power first. The first is set, so that whole powers are exact; the others are
  // least squares of the relative error, weighted until its peaks are level, the largest 9.2e-8.
  constexpr float kPolynomial[] = {1.0f, 0.6931470036506653f, 0.24022242426872253f, 0.05550733581185341f, 0.009671512991189957f, 0.001326472731307149f};
  constexpr float kRounder = 0x1.8p23f;  // added to a number, leaves no fraction: the sum's last bits are the nearest whole number
  return by_part(
      [&](FloatPart x) {
        const FloatPart low = FloatPart{} - 126.0f, high = FloatPart{} + 126.0f;
        x = x < low ? low : x;
        x = x > high ? high : x;
        const FloatPart rounded = x + kRounder, fraction = x - (rounded - kRounder);
        FloatPart power = FloatPart{} + kPolynomial[5];
        for (int at = 4; at >= 0; --at) power = fused(power, fraction, FloatPart{} + kPolynomial[at]);
        // The whole part goes straight into the exponent's bits.
        const IntPart scaled = reinterpret_cast<IntPart>(power) + (reinterpret_cast<IntPart>(rounded) << 23);
        return x == x ? reinterpret_cast<FloatPart>(scaled) : x;
      },
      exponents);
}

// Turns kLanes rows of as many numbers round: lane i of row j becomes lane j of row i.
inline void transpose(FloatPart (&rows)[kLanes]) {
  for (int half = 1; half < kLanes; half *= 2) {
    FloatPart next[kLanes];
    for (int at = 0; at < kLanes / 2; ++at) {
      const FloatPart a = rows[at], b = rows[at + kLanes / 2];
#if defined(__AVX512F__)
      next[2 * at] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      next[2 * at + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__)
      next[2 * at] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      next[2 * at + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
      next[2 * at] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      next[2 * at + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
    }
#pragma GCC unroll 16
    for (int at = 0; at < kLanes; ++at) rows[at] = next[at];
  }
}

inline FloatPart in_all_lanes(float number) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(number);
#elif defined(__AVX2__)
  return _mm256_set1_ps(number);
#elif defined(__ARM_NEON)
  return vdupq_n_f32(number);
#else
  return FloatPart{} + number;  // an addition, which would not be left out: zero may have a sign
#endif
}

// table[indices], lane by lane; of an index only the lowest bits count, as many as there are in the number of lanes.
inline WordPart looked_up(WordPart table, WordPart indices) {
#if defined(__AVX512F__)
  return reinterpret_cast<WordPart>(
      _mm512_permutexvar_epi32(reinterpret_cast<__m512i>(indices), reinterpret_cast<__m512i>(table)));
#elif defined(__AVX2__)
  return reinterpret_cast<WordPart>(
      _mm256_permutevar8x32_epi32(reinterpret_cast<__m256i>(table), reinterpret_cast<__m256i>(indices)));
#elif defined(__ARM_NEON) && defined(__aarch64__)
  // The processor looks up bytes: an index becomes those of its lane's four.
  const WordPart bytes = (indices & 3) * 0x04040404u + 0x03020100u;
  return reinterpret_cast<WordPart>(vqtbl1q_u8(reinterpret_cast<uint8x16_t>(table), reinterpret_cast<uint8x16_t>(bytes)));
#else
  WordPart result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = table[indices[lane] % kLanes];
  return result;
#endif
}

inline FloatPart looked_up(FloatPart table, WordPart indices) {
  return reinterpret_cast<FloatPart>(looked_up(reinterpret_cast<WordPart>(table), indices));
}

inline float from_half(uint16_t bits) {
#if defined(__F16C__)
  return _cvtsh_ss(bits);
#elif defined(__ARM_NEON)
  __fp16 number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
#else
  const uint32_t sign = uint32_t(bits & 0x8000) << 16;
  const uint32_t rest = bits & 0x7fff;
  uint32_t wide = sign;
  if (rest >= 0x7c00) wide |= 0x7f800000 | (rest & 0x3ff) << 13;
  else if (rest >= 0x0400) wide |= (rest << 13) + 0x38000000;
  else {
    const float small = rest * 0x1p-24f;
    return sign ? -small : small;
  }
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
#endif
}

inline float from_brain(uint16_t bits) {
  const uint32_t wide = uint32_t(bits) << 16;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

}  // namespace MACHD_TARGET
}  // namespace machd
