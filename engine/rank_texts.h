#pragma once
/// Internal: texts and outcomes that all ranks learn of.

#include <functional>
#include <string>
#include <vector>

#include "tranche/comm/communicator.h"

namespace tranche::detail {

/// Every rank's text on every rank, by rank. Collective.
std::vector<std::string> exchange_texts(Communicator& ranks, const std::string& mine, OperationLabel label);

/// Runs `work` on this rank; every rank learns whether it went well everywhere, and all throw CheckpointError
/// with the first failing rank's text if not. Returns what the ranks' works returned. Collective.
std::vector<std::string> together(Communicator& ranks, OperationLabel label,
                                  const std::function<std::string()>& work);

}  // namespace tranche::detail
