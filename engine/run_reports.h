#pragma once
/// Parts of a run's report. Private to engine/.

#include <string>

#include "tranche/engine/model_spec.h"
#include "tranche/engine/runtime.h"

namespace tranche::detail {

/// JSON text of the report's `memory` object: the largest of all ranks, by tier. Collective.
std::string memory_report(const Runtime& runtime);
/// JSON text of its `model` object.
std::string model_report(const ModelSpec& model);

}  // namespace tranche::detail
