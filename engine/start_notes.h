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

/// Says that units are updated before the ranks agree, or, of offloaded state, that they could be. `need`:
/// need_of_all_gradients().
void note_update(const Config& config, const std::string& need, std::vector<std::string>& notes);

}  // namespace tranche::detail
