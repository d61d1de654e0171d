#pragma once
/// Start-up notes about settings whose cost in overlap or memory is not obvious from their keys. Private to
/// engine/.

#include <string>
#include <vector>

#include "engine/state_store.h"
#include "tranche/device/ledger.h"

namespace tranche::detail {

/// One line for each note. `ledger` has the memory already in use, and `device` the memory available.
std::vector<std::string> notes_on_overlap(const StateStore& store, const Config& config, const Ledger& ledger,
                                          Device& device);

/// Adds a note if units are updated before the ranks agree, or if offloaded units could be. `need`: the
/// result of need_of_all_gradients().
void note_update(const Config& config, const std::string& need, std::vector<std::string>& notes);

}  // namespace tranche::detail
