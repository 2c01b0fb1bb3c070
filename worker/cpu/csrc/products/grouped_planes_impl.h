// Codes of 5 and 6 bits: four bits of each as nibbles, and the others of all as a plane behind them.
//
// Included by grouped_impl.h. Four inputs of a block are 128 codes, in the order that int8 codes have: nibble j of the
// first half and of the second share a byte, and a byte of the plane has the bits of codes that are as far apart as the
// plane has bytes. So codes become bytes again by shifts of whole vectors.

template <int kBits>
struct Planes {
  static constexpr int kHighBits = kBits - 4, kPlaneBytes = 16 * kHighBits;
  static constexpr int64_t kBytes = 64 + kPlaneBytes;
  static constexpr int kCodes = 4 * kColumns;
  static constexpr uint8_t kHighest = (1 << kBits) - 1, kAbove = kHighest & ~15;

#if TOKENYARD_LANES == 16
  // In bits above a code others may be left over, where `kIsMasked` does not say otherwise.
  template <bool kIsMasked>
  static void read(const uint8_t* data, __m512i (*codes)) {
    const __m512i nibbles = _mm512_loadu_si512(data), lower = _mm512_set1_epi8(15);
    __m512i plane, left, right;
    if constexpr (kHighBits == 2) {
      plane = _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(data + 64)));
      left = _mm512_setr_epi64(4, 4, 4, 4, 2, 2, 2, 2), right = _mm512_setr_epi64(0, 0, 0, 0, 2, 2, 2, 2);
    } else {
      plane = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 64)));
      left = _mm512_setr_epi64(4, 4, 3, 3, 2, 2, 1, 1), right = _mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3);
    }
    constexpr int kFirstWhereSet = 0xca;
    codes[0] = _mm512_ternarylogic_epi64(lower, nibbles, _mm512_sllv_epi64(plane, left), kFirstWhereSet);
    codes[1] = _mm512_ternarylogic_epi64(lower, _mm512_srli_epi16(nibbles, 4), _mm512_srlv_epi64(plane, right), kFirstWhereSet);
    if constexpr (kIsMasked) {
      for (int half = 0; half < 2; ++half) codes[half] = _mm512_and_si512(codes[half], _mm512_set1_epi8(kHighest));
    }
  }

  // The codes, less `zero`, as bytes.
  static void put(const uint8_t* data, uint8_t zero, uint8_t* bytes) {
    __m512i codes[2];
    read<true>(data, codes);
    for (int half = 0; half < 2; ++half) {
      _mm512_storeu_si512(bytes + 64 * half, _mm512_sub_epi8(codes[half], _mm512_set1_epi8(static_cast<int8_t>(zero))));
    }
  }
#elif TOKENYARD_LANES == 8
  // A quarter of the bits of a plane of two, or two eighths of a plane of one.
  static __m256i above(const uint8_t* data, int quarter) {
    if constexpr (kHighBits == 2) {
      const __m256i plane = load_bits(data + 64);
      return quarter == 0   ? _mm256_slli_epi16(plane, 4)
             : quarter == 1 ? _mm256_slli_epi16(plane, 2)
             : quarter == 2 ? plane
                            : _mm256_srli_epi16(plane, 2);
    } else {
      const __m256i plane = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(data + 64)));
      const __m256i one = _mm256_setr_epi64x(0, 0, 1, 1), two = _mm256_set1_epi64x(2), four = _mm256_set1_epi64x(4);
      return quarter == 0   ? _mm256_sllv_epi64(plane, _mm256_sub_epi64(four, one))
             : quarter == 1 ? _mm256_sllv_epi64(plane, _mm256_sub_epi64(two, one))
             : quarter == 2 ? _mm256_srlv_epi64(plane, one)
                            : _mm256_srlv_epi64(plane, _mm256_add_epi64(two, one));
    }
  }

  static void put(const uint8_t* data, uint8_t zero, uint8_t* bytes) {
    for (int quarter = 0; quarter < 4; ++quarter) {
      const __m256i raw = load_bits(data + quarter % 2 * 32);
      const __m256i nibbles = _mm256_and_si256(quarter < 2 ? raw : _mm256_srli_epi16(raw, 4), _mm256_set1_epi8(15));
      const __m256i high = _mm256_and_si256(above(data, quarter), _mm256_set1_epi8(static_cast<int8_t>(kAbove)));
      const __m256i codes = _mm256_sub_epi8(_mm256_or_si256(nibbles, high), _mm256_set1_epi8(static_cast<int8_t>(zero)));
      __builtin_memcpy(bytes + 32 * quarter, &codes, sizeof codes);
    }
  }
#else
  static void put(const uint8_t* data, uint8_t zero, uint8_t* bytes) {
    for (int i = 0; i < kCodes; ++i) {
      const int nibble = data[i % 64] >> (i / 64 * 4) & 15;
      const int high = data[64 + i % kPlaneBytes] >> (i / kPlaneBytes * kHighBits) & ((1 << kHighBits) - 1);
      bytes[i] = static_cast<uint8_t>((high << 4 | nibble) - zero);
    }
  }
#endif
};

template <typename T, int kBits>
struct FloatPlanes : FloatColumns<T> {
  static constexpr int64_t kBytesPerInput = Planes<kBits>::kBytes / 4;
  explicit FloatPlanes(const GroupedCodes& codes) : bytes(codes), raised_by(static_cast<uint8_t>(codes.shift)) {}

  void read(const uint8_t* data, Floats (*columns)[kParts]) const {
    alignas(64) uint8_t codes[Planes<kBits>::kCodes];
    Planes<kBits>::put(data, raised_by, codes);
    bytes.read(codes, columns);
  }

  FloatBytes<T, CodeKind::kInt8> bytes;
  uint8_t raised_by;
};

template <int kBits>
struct BytePlanes : ByteBytes {
  static constexpr int64_t kBytesPerInput = Planes<kBits>::kBytes / 4;
  explicit BytePlanes(const GroupedCodes& codes) : ByteBytes(codes) {}

  void read(const uint8_t* data, Words (*columns)[kParts]) const {
#if TOKENYARD_LANES == 16
    __m512i codes[2];
    Planes<kBits>::template read<true>(data, codes);
    for (int half = 0; half < 2; ++half) columns[0][half] = (Words)codes[half];
#else
    alignas(64) uint8_t codes[Planes<kBits>::kCodes];
    Planes<kBits>::put(data, 0, codes);
    ByteBytes::read(codes, columns);
#endif
  }
};

#if defined(TOKENYARD_BF16_DOT)
// Lower and upper bytes of 64 numbers of bf16 are two instructions, of 32 as well: these are there twice.
template <int kBits>
struct PairPlanes : PairColumns {
  static constexpr int kSharingTileRows = kScaledTileRows, kDirectRows = kScaledTileRows;
  static constexpr int64_t kBytesPerInput = Planes<kBits>::kBytes / 4;
  explicit PairPlanes(const GroupedCodes& codes)
      : low(_mm512_loadu_si512(codes.lookup)), high(_mm512_loadu_si512(codes.lookup + 64)) {}

  void read(const uint8_t* data, Vector (*columns)[kParts]) const {
    __m512i codes[2];
    Planes<kBits>::template read<false>(data, codes);
    for (int two = 0; two < 2; ++two) {
      const __m512i lower = _mm512_permutexvar_epi8(codes[two], low), upper = _mm512_permutexvar_epi8(codes[two], high);
      columns[two][0] = (Vector)_mm512_unpacklo_epi8(lower, upper);
      columns[two][1] = (Vector)_mm512_unpackhi_epi8(lower, upper);
    }
  }

  __m512i low, high;
};
#endif
