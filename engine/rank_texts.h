#pragma once
/// Exchanges texts and outcomes between all ranks. Private to engine/.

#include <functional>
#include <string>
#include <vector>

#include "tranche/comm/communicator.h"

namespace tranche::detail {

/// Returns every rank's text on every rank, by rank. Collective.
std::vector<std::string> exchange_texts(Communicator& ranks, const std::string& mine, OperationLabel label);

/// Runs `work` on this rank and returns the results of all ranks. If it throws on any rank, all throw
/// CheckpointError with the text of the first failing rank. Collective.
std::vector<std::string> together(Communicator& ranks, OperationLabel label,
                                  const std::function<std::string()>& work);

}  // namespace tranche::detail
