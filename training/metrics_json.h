#pragma once
/// The JSON of step_line(), for reports that contain it.

#include <nlohmann/json_fwd.hpp>

#include "tranche/engine/step_result.h"

namespace tranche::training {

/// JSON has no infinities and NaN, so they are null.
nlohmann::ordered_json json_number(double value);
/// The loss of an evaluation; null if it had no tokens.
nlohmann::ordered_json loss_json(const EvaluationResult& result);
nlohmann::ordered_json step_json(const StepResult& result);

}  // namespace tranche::training
