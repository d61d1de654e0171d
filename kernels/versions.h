#pragma once
/// The types of a kernel's versions, which follow from its signature in include/tranche/kernels/. A version
/// on GPUs has the signature itself: `decltype(kernels::cast) cast;` declares one.

#include "tranche/device/stream.h"

namespace tranche::kernels {

template <class Kernel>
struct VersionsOf;
template <class... Operands>
struct VersionsOf<void(Stream&, Operands...)> {
  using OnThread = void(Operands...);
  using OnThreads = void(int, Operands...);
};

/// On the calling thread, arguments checked.
template <class Kernel>
using OnThread = typename VersionsOf<Kernel>::OnThread;
/// On the calling thread and as many more as make the number that comes first, arguments checked.
template <class Kernel>
using OnThreads = typename VersionsOf<Kernel>::OnThreads;

}  // namespace tranche::kernels
