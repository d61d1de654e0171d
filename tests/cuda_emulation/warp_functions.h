#pragma once
/// Barriers, votes and shuffles under CUDA's names. Only cuda_emulation.h includes this.

inline void __syncthreads(cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::block_barrier(cuda_emulation::Predicate::none, false, where);
}
inline int __syncthreads_or(int predicate, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::block_barrier(cuda_emulation::Predicate::any, predicate != 0, where);
}
inline int __syncthreads_and(int predicate, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::block_barrier(cuda_emulation::Predicate::all, predicate != 0, where);
}
inline int __syncthreads_count(int predicate,
                               cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::block_barrier(cuda_emulation::Predicate::count, predicate != 0, where);
}
inline void __syncwarp(unsigned mask = 0xffffffffu,
                       cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::warp_collective(
      "__syncwarp", mask, [](void* const(&)[32], unsigned) {}, nullptr, where);
}

namespace cuda_emulation {

template <class T>
struct Shuffle {
  T value;
  int source;
  T result;
};

/// Returns the lane's own value if `source` is -1.
template <class T>
T shuffle(const char* name, unsigned mask, T value, int source, const Where& where) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "CUDA shuffles numbers of 4 and 8 bytes");
  if (source >= 0 && (mask >> source & 1) == 0) {
    fail_thread("a shuffle reads from a lane outside its mask", where);
  }
  Shuffle<T> mine{value, source, value};
  warp_collective(
      name, mask,
      [](void* const(&payloads)[32], unsigned) {
        for (void* payload : payloads) {
          auto* lane = static_cast<Shuffle<T>*>(payload);
          if (lane != nullptr && lane->source >= 0) {
            lane->result = static_cast<Shuffle<T>*>(payloads[lane->source])->value;
          }
        }
      },
      &mine, where);
  return mine.result;
}

inline void check_width(int width, const Where& where) {
  if (width < 1 || width > 32 || (width & (width - 1)) != 0) {
    fail_thread("a shuffle's width is not a power of two up to 32", where);
  }
}

}  // namespace cuda_emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::check_width(width, where);
  const int first = cuda_emulation::lane_of_current() & ~(width - 1);
  return cuda_emulation::shuffle("__shfl_sync", mask, value, first + (source & (width - 1)), where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32,
                  cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::check_width(width, where);
  const int lane = cuda_emulation::lane_of_current();
  const int source = lane ^ lane_mask;
  // Lanes of later segments cannot be read; lanes of earlier ones can.
  const bool reachable = source >= 0 && source < (lane & ~(width - 1)) + width;
  return cuda_emulation::shuffle("__shfl_xor_sync", mask, value, reachable ? source : -1, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::check_width(width, where);
  const int lane = cuda_emulation::lane_of_current();
  const int source = lane - static_cast<int>(delta);
  return cuda_emulation::shuffle("__shfl_up_sync", mask, value, source >= (lane & ~(width - 1)) ? source : -1,
                                 where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   cuda_emulation::Where where = cuda_emulation::Where::current()) {
  cuda_emulation::check_width(width, where);
  const int lane = cuda_emulation::lane_of_current();
  const int source = lane + static_cast<int>(delta);
  return cuda_emulation::shuffle("__shfl_down_sync", mask, value,
                                 source < (lane & ~(width - 1)) + width ? source : -1, where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              cuda_emulation::Where where = cuda_emulation::Where::current()) {
  struct Vote {
    bool yes;
    unsigned result;
  } mine{predicate != 0, 0};
  cuda_emulation::warp_collective(
      "__ballot_sync", mask,
      [](void* const(&payloads)[32], unsigned) {
        unsigned votes = 0;
        for (int lane = 0; lane < 32; ++lane) {
          const auto* vote = static_cast<const Vote*>(payloads[lane]);
          if (vote != nullptr && vote->yes) votes |= 1u << lane;
        }
        for (void* payload : payloads) {
          if (payload != nullptr) static_cast<Vote*>(payload)->result = votes;
        }
      },
      &mine, where);
  return mine.result;
}
inline int __any_sync(unsigned mask, int predicate,
                      cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return __ballot_sync(mask, predicate == 0, where) == 0;
}

namespace cuda_emulation {

template <class T, class Combine>
T warp_reduce(const char* name, unsigned mask, T value, Combine, const Where& where) {
  T mine = value;
  warp_collective(
      name, mask,
      [](void* const(&payloads)[32], unsigned) {
        bool first = true;
        T total{};
        for (void* payload : payloads) {
          if (payload == nullptr) continue;
          total = first ? *static_cast<T*>(payload) : Combine{}(total, *static_cast<T*>(payload));
          first = false;
        }
        for (void* payload : payloads) {
          if (payload != nullptr) *static_cast<T*>(payload) = total;
        }
      },
      &mine, where);
  return mine;
}
struct Least {
  template <class T>
  T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};
struct Most {
  template <class T>
  T operator()(T a, T b) const {
    return a < b ? b : a;
  }
};

}  // namespace cuda_emulation

template <class T>
T __reduce_add_sync(unsigned mask, T value, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
  return static_cast<T>(cuda_emulation::warp_reduce("__reduce_add_sync", mask, static_cast<unsigned>(value),
                                                    std::plus<>{}, where));
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
  return cuda_emulation::warp_reduce("__reduce_min_sync", mask, value, cuda_emulation::Least{}, where);
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, cuda_emulation::Where where = cuda_emulation::Where::current()) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4);
  return cuda_emulation::warp_reduce("__reduce_max_sync", mask, value, cuda_emulation::Most{}, where);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value,
                                 cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::warp_reduce("__reduce_or_sync", mask, value, std::bit_or<>{}, where);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value,
                                  cuda_emulation::Where where = cuda_emulation::Where::current()) {
  return cuda_emulation::warp_reduce("__reduce_and_sync", mask, value, std::bit_and<>{}, where);
}
