#pragma once
/// The texts of the configuration's enums.

#include <array>
#include <cstddef>
#include <string_view>

#include "tranche/config/config.h"
#include "tranche/config/offload.h"
#include "tranche/config/precision.h"

namespace tranche::detail {

/// The texts of an enum's values, in the order of the values.
template <typename E>
inline constexpr std::array<std::string_view, 0> names_of = {};
template <>
inline constexpr auto names_of<ReductionPolicy> = std::to_array<std::string_view>({"auto", "boundary",
                                                                                   "micro_batch"});
template <>
inline constexpr auto names_of<Replicate> = std::to_array<std::string_view>({"all", "parameters"});
template <>
inline constexpr auto names_of<ReplicaSum> = std::to_array<std::string_view>({"micro_batch", "step"});
template <>
inline constexpr auto names_of<UpdateTime> = std::to_array<std::string_view>({"at_the_boundary",
                                                                              "as_reduced"});
template <>
inline constexpr auto names_of<TieSum> = std::to_array<std::string_view>({"together", "by_use"});
template <>
inline constexpr auto names_of<PipelineCuts> = std::to_array<std::string_view>({"balanced", "equal",
                                                                                "parameters", "listed"});
template <>
inline constexpr auto names_of<TensorSums> = std::to_array<std::string_view>({"rank_order", "chain"});
template <>
inline constexpr auto names_of<ContextExchange> = std::to_array<std::string_view>({"gather", "ulysses"});
template <>
inline constexpr auto names_of<GatherFor> = std::to_array<std::string_view>({"use", "step"});
template <>
inline constexpr auto names_of<OffloadTier> = std::to_array<std::string_view>({"none", "cpu", "nvme"});
template <>
inline constexpr auto names_of<MasterFormat> = std::to_array<std::string_view>({"fp32", "split", "none"});

template <typename E>
std::string_view name_in(E value) {
  const auto number = static_cast<std::size_t>(value);
  return number < names_of<E>.size() ? names_of<E>[number] : "?";
}

}  // namespace tranche::detail
