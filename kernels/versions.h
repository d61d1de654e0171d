#pragma once
/// The types of a kernel's versions, derived from its signature in include/tranche/kernels/. The GPU version
/// has the signature itself: `decltype(kernels::cast) cast;` declares one.

#include "tranche/device/stream.h"

namespace tranche::kernels {

template <class Kernel>
struct VersionsOf;
template <class... Operands>
struct VersionsOf<void(Stream&, Operands...)> {
  using OnThread = void(Operands...);
  using OnThreads = void(int, Operands...);
};

/// Runs on the calling thread; arguments are checked before.
template <class Kernel>
using OnThread = typename VersionsOf<Kernel>::OnThread;
/// Runs on the calling thread and further ones, as many in all as the first argument; arguments are checked
/// before.
template <class Kernel>
using OnThreads = typename VersionsOf<Kernel>::OnThreads;

}  // namespace tranche::kernels
