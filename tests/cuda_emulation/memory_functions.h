#pragma once
/// Functions that device code may call without an include: loads and stores with cache hints, fences,
/// atomics. Only cuda_emulation.h includes this.

#include <algorithm>
#include <type_traits>

// Loads and stores with cache hints.
template <class T>
T __ldg(const T* p) {
  return *p;
}
template <class T>
T __ldcg(const T* p) {
  return *p;
}
template <class T>
T __ldca(const T* p) {
  return *p;
}
template <class T>
T __ldcs(const T* p) {
  return *p;
}
template <class T>
T __ldlu(const T* p) {
  return *p;
}
template <class T>
T __ldcv(const T* p) {
  return *p;
}
template <class T>
void __stcs(T* p, T value) {
  *p = value;
}
template <class T>
void __stcg(T* p, T value) {
  *p = value;
}
template <class T>
void __stwb(T* p, T value) {
  *p = value;
}
template <class T>
void __stwt(T* p, T value) {
  *p = value;
}

inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() {}
inline void __threadfence_system() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __nanosleep(unsigned) {}
[[noreturn]] void __trap();
inline long long clock64() {
  return 0;
}

// Atomics. Kernels of different streams run in parallel.
namespace cuda_emulation {
template <class T>
using Same = std::type_identity_t<T>;

/// Replaces *p by change(*p) and returns the old value.
template <class T, class Change>
T atomic_update(T* p, Change change) {
  T old;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  for (;;) {
    T wanted = change(old);
    if (__atomic_compare_exchange(p, &old, &wanted, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED)) return old;
  }
}
}  // namespace cuda_emulation

template <class T>
T atomicAdd(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T old) { return static_cast<T>(old + value); });
}
template <class T>
T atomicSub(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T old) { return static_cast<T>(old - value); });
}
template <class T>
T atomicMin(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T old) { return std::min(old, value); });
}
template <class T>
T atomicMax(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T old) { return std::max(old, value); });
}
template <class T>
T atomicOr(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T old) { return static_cast<T>(old | value); });
}
template <class T>
T atomicAnd(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T old) { return static_cast<T>(old & value); });
}
template <class T>
T atomicXor(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T old) { return static_cast<T>(old ^ value); });
}
template <class T>
T atomicExch(T* p, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [value](T) { return value; });
}
template <class T>
T atomicCAS(T* p, cuda_emulation::Same<T> expected, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_update(p, [=](T old) { return old == expected ? value : old; });
}
