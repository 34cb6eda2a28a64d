// Packed weights expanded to float32, sixteen at a time; scale and bias are applied with one rounding.
#pragma once

#include <algorithm>

#include "vectors.h"
#include "weights.h"

namespace machd {
namespace MACHD_TARGET {

// Inputs of a row that are worked on at once. It is a multiple of every group.
constexpr long kStretch = 2048;

// Scales and biases of a stretch of one row in float32, beside the registers that a reader works with.
struct ScaleBuffer {
  float scales[kStretch / kBlock];
  float biases[kStretch / kBlock];
};

// Converts `count` scales, from one on.
inline void convert(const void* scales, ScaleType type, long from, long count, float* to) {
  long at = 0;
  if (type == ScaleType::kFloat32) {
    std::memcpy(to, static_cast<const float*>(scales) + from, sizeof(float) * count);
    return;
  }
  const auto* halves = static_cast<const uint16_t*>(scales) + from;
#if defined(__AVX512F__)
  for (; at < count; at += kLanes) {
    const __mmask16 mask = __mmask16((1u << std::min<long>(kLanes, count - at)) - 1);
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, halves + at);
    const __m512 numbers =
        type == ScaleType::kFloat16 ? _mm512_cvtph_ps(bits) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    _mm512_mask_storeu_ps(to + at, mask, numbers);
  }
#elif defined(__AVX2__)
  if (type == ScaleType::kFloat16)
    for (; at + 8 <= count; at += 8)
      _mm256_storeu_ps(to + at, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + at))));
#endif
  for (; at < count; ++at) to[at] = type == ScaleType::kFloat16 ? from_half(halves[at]) : from_brain(halves[at]);
}

// Values of the four bits of e2m1, and of the scales' formats: OCP Microscaling Formats, version 1.0, section 5.3.
constexpr float kE2m1[16] = {0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0f, -0.5, -1, -1.5, -2, -3, -4, -6};

inline float from_e8m0(uint8_t bits) {
  uint32_t wide = bits == 0 ? 0x00400000u : uint32_t(bits) << 23;
  float number;
  std::memcpy(&number, &wide, sizeof number);
  return number;
}

inline float from_e4m3(uint8_t bits) {
  const uint32_t sign = uint32_t(bits & 0x80) << 24;
  const uint32_t rest = bits & 0x7f;
  float number;
  if (rest == 0x7f) {
    const uint32_t nan = sign | 0x7fc00000;
    std::memcpy(&number, &nan, sizeof number);
  } else if (rest >= 0x08) {
    const uint32_t wide = sign | ((rest << 20) + (120u << 23));
    std::memcpy(&number, &wide, sizeof number);
  } else {
    number = (sign ? -1.0f : 1.0f) * rest * 0x1p-9f;
  }
  return number;
}

// As many bytes as there are lanes, each in a lane of its own.
inline WordPart widened(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<WordPart>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<WordPart>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  WordPart words;
  for (int lane = 0; lane < kLanes; ++lane) words[lane] = from[lane];
  return words;
#endif
}

// Four or eight bytes in the first lanes; what the others hold is nobody's. Through memory the compiler would take ten times as long.
template <int kBytes>
inline WordPart first_lanes(const uint8_t* from) {
#if defined(__AVX2__)
  __m128i low;
  if constexpr (kBytes == 4) low = _mm_loadu_si32(from);
  else low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
#if defined(__AVX512F__)
  return reinterpret_cast<WordPart>(_mm512_castsi128_si512(low));
#else
  return reinterpret_cast<WordPart>(_mm256_castsi128_si256(low));
#endif
#else
  WordPart words{};
  std::memcpy(&words, from, kBytes);
  return words;
#endif
}

// The sixteen packed weights at `from`, each in the lowest bits of a lane; what is above them is another weight's.
template <int kBits>
inline void spread(const uint8_t* from, WordPart (&words)[kParts]) {
  if constexpr (kBits == 8) {
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) words[p] = widened(from + p * kLanes);
  } else {
    constexpr int kPerWord = 32 / kBits;
    const WordPart loaded = first_lanes<kBlock * kBits / 8>(from);
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
      WordPart word, shift;
      for (int lane = 0; lane < kLanes; ++lane) {
        word[lane] = (p * kLanes + lane) / kPerWord;
        shift[lane] = kBits * ((p * kLanes + lane) % kPerWord);
      }
      words[p] = looked_up(loaded, word) >> shift;
    }
  }
}

#if defined(__AVX2__)
// The bytes of sixteen weights of 3, 5 or 6 bits, and none behind them.
template <int kBits>
inline __m128i bytes_of_block(const uint8_t* from) {
  if constexpr (kBits == 6) {
    int last;
    std::memcpy(&last, from + 8, sizeof last);
    return _mm_insert_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)), last, 2);
  } else {
    constexpr int kWhole = kBits == 5 ? 8 : 4;
    uint16_t last;
    std::memcpy(&last, from + kWhole, sizeof last);
    const __m128i first = kBits == 5 ? _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)) : _mm_loadu_si32(from);
    return _mm_insert_epi16(first, last, kWhole / 2);
  }
}

// For each lane the places of four bytes, from the one on in which its weight begins: each quarter of a register has all of them.
template <int kBits>
struct Places {
  alignas(64) uint8_t of[4 * kBlock];
  constexpr Places() : of{} {
    for (int lane = 0; lane < kBlock; ++lane)
      for (int byte = 0; byte < 4; ++byte) of[4 * lane + byte] = uint8_t(lane * kBits / 8 + byte);
  }
};

// The sixteen packed weights at `from`, each in the lowest bits of a lane, where a weight may lie across words.
template <int kBits>
inline void spread_across(const uint8_t* from, WordPart (&words)[kParts]) {
  static constexpr Places<kBits> places;
  const __m128i bytes = bytes_of_block<kBits>(from);
#pragma GCC unroll 4
  for (int p = 0; p < kParts; ++p) {
    WordPart shift;
    for (int lane = 0; lane < kLanes; ++lane) shift[lane] = (p * kLanes + lane) * kBits % 8;
#if defined(__AVX512F__)
    const __m512i chosen = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), _mm512_load_si512(places.of));
#else
    const auto* half = reinterpret_cast<const __m256i*>(places.of) + p;
    const __m256i chosen = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), _mm256_load_si256(half));
#endif
    words[p] = reinterpret_cast<WordPart>(chosen) >> shift;
  }
}
#endif

// Reads the weights of one row: `begin` the row, `prepare` a stretch of so many groups, `enter` one of these, and kVectors times
// sixteen weights of it `at` a time.
template <Format kFormat, int kBits>
class Expander;

// Weights of 4 bits come in pairs, two in a byte, so rows lie beside them as arrange() puts them: of each thirty-two numbers the even
// ones, and behind them the odd ones.
constexpr long kPaired = 2 * kBlock;

inline void arrange(const float* x, long count, float* to) {
  for (long at = 0; at < count; at += kPaired)
    for (int pair = 0; pair < kBlock; ++pair) {
      to[at + pair] = x[at + 2 * pair];
      to[at + kBlock + pair] = x[at + 2 * pair + 1];
    }
}

template <>
class Expander<Format::kFloat32, 32> {
 public:
  static constexpr int kVectors = 1;
  void begin(const Weights& w, long row, ScaleBuffer&) { from_ = static_cast<const float*>(w.packed) + row * w.inputs; }
  void prepare(long, long) {}
  void enter(long) {}
  void at(long k, Vector (&weights)[1]) { weights[0] = Vector::load(from_ + k); }
  float one_at(long k) { return from_[k]; }

 private:
  const float* from_;
};

template <Format kFormat>
class Expander<kFormat, 16> {
 public:
  static constexpr int kVectors = 1;
  void begin(const Weights& w, long row, ScaleBuffer&) { from_ = static_cast<const uint16_t*>(w.packed) + row * w.inputs; }
  void prepare(long, long) {}
  void enter(long) {}

  void at(long k, Vector (&weights)[1]) {
    Vector& result = weights[0];
#pragma GCC unroll 4
    for (int p = 0; p < kParts; ++p) {
#if defined(__AVX512F__)
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from_ + k));
      if constexpr (kFormat == Format::kFloat16) result.part[p] = _mm512_cvtph_ps(bits);
      else result.part[p] = reinterpret_cast<FloatPart>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#elif defined(__AVX2__)
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from_ + k + 8 * p));
      if constexpr (kFormat == Format::kFloat16) result.part[p] = _mm256_cvtph_ps(bits);
      else result.part[p] = reinterpret_cast<FloatPart>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
#else
      for (int lane = 0; lane < kLanes; ++lane) result.part[p][lane] = one_at(k + p * kLanes + lane);
#endif
    }
  }

  float one_at(long k) { return kFormat == Format::kFloat16 ? from_half(from_[k]) : from_brain(from_[k]); }

 private:
  const uint16_t* from_;
};

// Affine weights: scale * q + bias, where q is the whole number that is stored.
template <int kBits>
class Expander<Format::kAffine, kBits> {
 public:
  static constexpr int kVectors = kBits == 4 ? 2 : 1;
  void begin(const Weights& w, long row, ScaleBuffer& buffer) {
    w_ = &w;
    from_ = static_cast<const uint8_t*>(w.packed) + row * w.row_bytes();
    first_group_ = row * (w.inputs / w.group);
    scales_ = buffer.scales;
    biases_ = buffer.biases;
  }

  void prepare(long k, long count) {
    const long from = first_group_ + k / w_->group;
    convert(w_->scales, w_->scale_type, from, count, scales_);
    convert(w_->biases, w_->scale_type, from, count, biases_);
  }

  void enter(long group) {
    const FloatPart scale = in_all_lanes(scales_[group]), bias = in_all_lanes(biases_[group]);
    if constexpr (kHasTable) {
      FloatPart numbers;
      for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = float(lane);
      table_ = fused(numbers, scale, bias);
    } else {
      scale_ = scale;
      bias_ = bias;
    }
  }

  void at(long k, Vector (&weights)[kVectors]) {
    const uint8_t* from = from_ + (k * kBits >> 3);
    Vector& result = weights[0];
    if constexpr (kBits == 4) {
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) {
        const WordPart pairs = widened(from + p * kLanes);
        weights[0].part[p] = number(pairs);
        weights[1].part[p] = number(pairs >> 4);
      }
    } else if constexpr (kBits == 2 || kBits == 8) {
      WordPart words[kParts];
      spread<kBits>(from, words);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) result.part[p] = number(words[p]);
    } else {
#if defined(__AVX2__)
      WordPart words[kParts];
      spread_across<kBits>(from, words);
#pragma GCC unroll 4
      for (int p = 0; p < kParts; ++p) result.part[p] = number(words[p]);
#else
      // A weight may lie across words. The row's last bytes are copied, so that nothing behind them is read.
      uint8_t bytes[kBlock * kBits / 8 + 3] = {};
      std::memcpy(bytes, from, kBlock * kBits / 8);
      for (int lane = 0; lane < kBlock; ++lane) {
        uint32_t word;
        std::memcpy(&word, bytes + lane * kBits / 8, sizeof word);
        const float whole = float(word >> lane * kBits % 8 & kMask);
        result.part[lane / kLanes][lane % kLanes] = __builtin_fmaf(whole, scale_[0], bias_[0]);
      }
#endif
    }
  }

 private:
  // Of weights in the lowest bits of each lane.
  FloatPart number(WordPart words) const {
    // A look-up among sixteen takes the lowest four bits of a lane, whatever is above them.
    if constexpr (kHasTable) return looked_up(table_, kMask + 1 == kLanes ? words : words & kMask);
    const IntPart whole = reinterpret_cast<IntPart>(kBits == 8 ? words : words & kMask);
    return fused(__builtin_convertvector(whole, FloatPart), scale_, bias_);
  }

  static constexpr uint32_t kMask = (1u << kBits) - 1;
  // All values of a group fit into one register: a look-up there takes the place of conversion and product.
  static constexpr bool kHasTable = (1 << kBits) <= kLanes && (kBits == 2 || kBits == 4);
  const Weights* w_;
  const uint8_t* from_;
  long first_group_;
  FloatPart scale_, bias_, table_;
  float* scales_;  // of a stretch
  float* biases_;
};

// Microscaling formats: a scale without bias, and values with an exponent of their own.
template <Format kFormat>
class ScaledExpander {
 public:
  static constexpr int kVectors = 1;
  static constexpr int kBits = kFormat == Format::kMxfp8 ? 8 : 4;
  void begin(const Weights& w, long row, ScaleBuffer&) {
    w_ = &w;
    from_ = static_cast<const uint8_t*>(w.packed) + row * w.row_bytes();
    scales_ = static_cast<const uint8_t*>(w.scales) + row * (w.inputs / w.group);
  }

  void prepare(long k, long) { stretch_ = scales_ + k / w_->group; }

  void enter(long group) {
    const uint8_t bits = stretch_[group];
    scale_ = kFormat == Format::kNvfp4 ? from_e4m3(bits) : from_e8m0(bits);
  }

  void at(long k, Vector (&weights)[1]) {
    Vector& result = weights[0];
    for (int lane = 0; lane < kBlock; ++lane) {
      const uint8_t byte = from_[(k + lane) * kBits / 8];
      const float value = kBits == 8 ? from_e4m3(byte) : kE2m1[lane % 2 ? byte >> 4 : byte & 15];
      result.part[lane / kLanes][lane % kLanes] = value * scale_;
    }
  }

 private:
  const Weights* w_;
  const uint8_t* from_;
  const uint8_t* scales_;
  const uint8_t* stretch_;
  float scale_;
};

template <>
class Expander<Format::kMxfp4, 4> : public ScaledExpander<Format::kMxfp4> {};
template <>
class Expander<Format::kNvfp4, 4> : public ScaledExpander<Format::kNvfp4> {};
template <>
class Expander<Format::kMxfp8, 8> : public ScaledExpander<Format::kMxfp8> {};

}  // namespace MACHD_TARGET
}  // namespace machd
