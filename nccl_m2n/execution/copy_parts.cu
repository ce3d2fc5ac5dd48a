// SPDX-License-Identifier: Apache-2.0
//
// Every copy of one launch: parts of boxes of any strides, packed, unpacked or moved within the rank.
// A copy is one row of `COPY` in descriptors.py. A warp takes a tile of one copy at a time, so a launch
// balances however many copies there are and however long each is.

typedef long long i64;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define WARPS_PER_BLOCK 8
#define DIMENSIONS 8
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM 3
#endif
#define TILE_BYTES 4096  // also in descriptors.py
#define ALL_LANES 0xffffffffu

// The fields of `COPY`, in its order. 32 of them: each lane of a warp fetches one. The first four come from
// the copy's own row, where the number of its shape follows them; the others from that shape.
#define PLACE_FIELDS 4
#define SHAPE_FIELDS (WARP - PLACE_FIELDS)
struct Copy {
  i64 source, destination, start, stop, run, source_unit, destination_unit, cast;
  i64 extent[DIMENSIONS], source_stride[DIMENSIONS], destination_stride[DIMENSIONS];
};

// Where a tile begins: at unit `column` of the run whose outer indices are `index`.
struct Tile {
  i64 source, destination;  // addresses of that run's first unit
  i64 column;
  u32 count;     // units in the tile
  u32 in_first;  // of them, those before the first run ends
  u32 run;       // units of a run; only looked at when a run is shorter than the tile
  u32 inverse;   // ceil(2^31 / run)
};

struct Offsets {
  i64 source, destination;
};

// The copy that a tile belongs to: the last one whose first tile is not after it. 32 probes a step.
__device__ int find_copy(const int* first_tile, int copies, int tile, int lane) {
  int low = 0, size = copies;
  while (size > 1) {
    int step = (size + WARP - 1) / WARP;
    bool before = lane * step < size && first_tile[low + lane * step] <= tile;
    int passed = __popc(__ballot_sync(ALL_LANES, before)) - 1;  // lane 0 always passes
    low += passed * step;
    size = min(step, size - passed * step);
  }
  return low;
}

__device__ Tile begin_tile(const Copy& copy, i64* index, i64 tile, int lane) {
  u32 units = TILE_BYTES / (u32)max(copy.source_unit, copy.destination_unit);
  i64 begin = copy.start + tile * units;
  Tile here;
  here.count = (u32)min((i64)units, copy.stop - begin);
  i64 row = begin < copy.run ? 0 : begin / copy.run;
  here.column = begin - row * copy.run;
  here.in_first = (u32)min((i64)here.count, copy.run - here.column);
  here.run = (u32)min(copy.run, (i64)TILE_BYTES);
  here.inverse = (0x80000000u + here.run - 1) / here.run;
  here.source = copy.source;
  here.destination = copy.destination;
#pragma unroll 1
  for (int d = 0; d < DIMENSIONS; ++d) {
    i64 next = row < copy.extent[d] ? 0 : row / copy.extent[d];
    i64 i = row - next * copy.extent[d];
    here.source += i * copy.source_stride[d];
    here.destination += i * copy.destination_stride[d];
    if (lane == 0) index[d] = i;
    row = next;
  }
  __syncwarp();
  return here;
}

// Offsets of a tile's unit from the tile's first run. Carries from dimension to dimension without a
// 64-bit division: all that is divided is less than the units of a tile.
__device__ Offsets walk(const Copy& copy, const Tile& here, const i64* index, u32 unit) {
  Offsets to = {0, 0};
  i64 inner = here.column + unit;
  if (unit >= here.in_first) {
    u32 past = unit - here.in_first;
    u32 runs = __umulhi(past << 1, here.inverse);  // past / run, exact since both are below 2^13
    inner = past - runs * here.run;
    i64 steps = runs + 1;
#pragma unroll 1
    for (int d = 0; d < DIMENSIONS; ++d) {
      to.source += steps * copy.source_stride[d];
      to.destination += steps * copy.destination_stride[d];
      i64 over = index[d] + steps - copy.extent[d];
      if (over < 0) break;
      i64 wraps = over < copy.extent[d] ? 1 : 1 + (u32)over / (u32)copy.extent[d];
      to.source -= wraps * copy.extent[d] * copy.source_stride[d];
      to.destination -= wraps * copy.extent[d] * copy.destination_stride[d];
      steps = wraps;
    }
  }
  to.source += inner * copy.source_unit;
  to.destination += inner * copy.destination_unit;
  return to;
}

// Move a tile by accesses of type T. All loads of a batch are issued before its first store: the compiler
// cannot know that source and destination do not overlap, and would wait for each load in turn.
template <typename T, int BATCH, int STRIDED_BATCH>
__device__ void move(const Copy& copy, const Tile& here, const i64* index, int lane) {
  if (here.in_first == here.count) {  // contiguous
    const T* source = (const T*)here.source + here.column + lane;
    T* destination = (T*)here.destination + here.column + lane;
    u32 left = here.count > (u32)lane ? (here.count - lane + WARP - 1) / WARP : 0;
    for (; left >= BATCH; left -= BATCH, source += BATCH * WARP, destination += BATCH * WARP) {
      T held[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) held[i] = source[i * WARP];
#pragma unroll
      for (int i = 0; i < BATCH; ++i) destination[i * WARP] = held[i];
    }
    for (; left > 0; --left, source += WARP, destination += WARP) *destination = *source;
    return;
  }
  for (u32 unit = lane; unit < here.count; unit += STRIDED_BATCH * WARP) {
    T held[STRIDED_BATCH];
    i64 destination[STRIDED_BATCH];
#pragma unroll
    for (int i = 0; i < STRIDED_BATCH; ++i) {
      if (unit + i * WARP < here.count) {
        Offsets to = walk(copy, here, index, unit + i * WARP);
        held[i] = *(const T*)(here.source + to.source);
        destination[i] = here.destination + to.destination;
      }
    }
#pragma unroll
    for (int i = 0; i < STRIDED_BATCH; ++i)
      if (unit + i * WARP < here.count) *(T*)destination[i] = held[i];
  }
}

// Floating-point formats, numbered as in formats.py.
enum Format { FLOAT64 = 1, FLOAT32, FLOAT16, BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2 };

// What tells one small format from another. E4M3FN has no infinity: its largest code is its one NaN.
struct Small {
  u32 bits, mantissa, bias, infinity, nan;
};

__device__ Small small_format(int format) {
  switch (format) {
    case FLOAT16: return {16, 10, 15, 0x7c00, 0x7e00};
    case BFLOAT16: return {16, 7, 127, 0x7f80, 0x7fc0};
    case FLOAT8_E4M3FN: return {8, 3, 7, 0x7f, 0x7f};
    default: return {8, 2, 15, 0x7c, 0x7e};
  }
}

__device__ float widen_small(u32 code, Small format) {
  u32 sign = code >> (format.bits - 1) << 31;
  u32 magnitude = code & ((1u << (format.bits - 1)) - 1);
  u32 mantissa = magnitude & ((1u << format.mantissa) - 1);
  u32 exponent = magnitude >> format.mantissa;
  if (magnitude >= format.nan || magnitude > format.infinity) return __uint_as_float(sign | 0x7fc00000u);
  if (magnitude == format.infinity) return __uint_as_float(sign | 0x7f800000u);
  if (exponent == 0) {  // mantissa * 2^(1 - bias - mantissa bits), in two factors that float can hold
    float value = (float)mantissa * __uint_as_float((127u - format.mantissa) << 23);
    value *= format.bias == 127 ? __uint_as_float(1u << 23) : __uint_as_float((128u - format.bias) << 23);
    return __uint_as_float(__float_as_uint(value) | sign);
  }
  return __uint_as_float(sign | (exponent + 127 - format.bias) << 23 | mantissa << (23 - format.mantissa));
}

// Round to nearest, ties to even.
__device__ u32 narrow_float(float value, Small format) {
  u32 code = __float_as_uint(value);
  u32 sign = code >> 31 << (format.bits - 1);
  u32 magnitude = code & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | format.nan;
  int exponent = magnitude < 0x00800000u ? -126 : (int)(magnitude >> 23) - 127;
  u32 mantissa = magnitude < 0x00800000u ? magnitude : (magnitude & 0x7fffffu) | 0x800000u;
  int least = 1 - (int)format.bias;
  int shift = 23 - (int)format.mantissa + max(0, least - exponent);
  if (shift > 25) return sign;
  u32 rounded = (mantissa + (1u << (shift - 1)) - 1 + (mantissa >> shift & 1)) >> shift;
  u32 result = ((u32)(max(exponent, least) - least) << format.mantissa) + rounded;
  return sign | min(result, format.infinity);
}

__device__ double load(int format, i64 address) {
  switch (format) {
    case FLOAT64: return *(const double*)address;
    case FLOAT32: return *(const float*)address;
    case FLOAT16:
    case BFLOAT16: return widen_small(*(const unsigned short*)address, small_format(format));
    default: return widen_small(*(const unsigned char*)address, small_format(format));
  }
}

__device__ void store(int format, i64 address, double value) {
  switch (format) {
    case FLOAT64: *(double*)address = value; break;
    case FLOAT32: *(float*)address = (float)value; break;
    case FLOAT16:
    case BFLOAT16: *(unsigned short*)address = narrow_float((float)value, small_format(format)); break;
    default: *(unsigned char*)address = narrow_float((float)value, small_format(format));
  }
}

template <int BATCH>
__device__ void cast(const Copy& copy, const Tile& here, const i64* index, int lane) {
  int from = (int)copy.cast / 16, to = (int)copy.cast % 16;
  for (u32 unit = lane; unit < here.count; unit += BATCH * WARP) {
    double held[BATCH];
    i64 destination[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (unit + i * WARP < here.count) {
        Offsets at = walk(copy, here, index, unit + i * WARP);
        held[i] = load(from, here.source + at.source);
        destination[i] = here.destination + at.destination;
      }
    }
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (unit + i * WARP < here.count) store(to, destination[i], held[i]);
  }
}

extern "C" __global__ void __launch_bounds__(WARP* WARPS_PER_BLOCK, BLOCKS_PER_SM)
    copy_parts(const i64* rows, const i64* shapes, const int* first_tile, int count, int tiles) {
  __shared__ Copy held[WARPS_PER_BLOCK];
  __shared__ i64 indices[WARPS_PER_BLOCK][DIMENSIONS];
  int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
  Copy& copy = held[warp];
  i64* index = indices[warp];
  for (int tile = blockIdx.x * WARPS_PER_BLOCK + warp; tile < tiles; tile += gridDim.x * WARPS_PER_BLOCK) {
    int number = find_copy(first_tile, count, tile, lane);
    const i64* row = rows + (i64)number * (PLACE_FIELDS + 1);
    const i64* shape = shapes + row[PLACE_FIELDS] * SHAPE_FIELDS;
    __syncwarp();  // the last tile's fields may still be in use
    ((i64*)&copy)[lane] = lane < PLACE_FIELDS ? row[lane] : shape[lane - PLACE_FIELDS];
    __syncwarp();
    Tile here = begin_tile(copy, index, tile - first_tile[number], lane);
    if (copy.cast) {
      cast<4>(copy, here, index, lane);
      continue;
    }
    switch (copy.source_unit) {
      case 16: move<uint4, 8, 2>(copy, here, index, lane); break;
      case 8: move<uint2, 8, 4>(copy, here, index, lane); break;
      case 4: move<u32, 8, 4>(copy, here, index, lane); break;
      case 2: move<unsigned short, 8, 4>(copy, here, index, lane); break;
      default: move<unsigned char, 8, 4>(copy, here, index, lane);
    }
  }
}
