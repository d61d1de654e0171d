#pragma once
/// Notes at the start about settings that cost overlap or memory in a way their keys do not say. Private to
/// engine/.

#include <string>
#include <vector>

#include "engine/state_store.h"
#include "tranche/device/ledger.h"

namespace tranche::detail {

/// One line for each. `ledger` and `device`: what is taken already, and what there is.
std::vector<std::string> notes_on_overlap(const StateStore& store, const Config& config, const Ledger& ledger,
                                          Device& device);

}  // namespace tranche::detail
