#pragma once
/// The JSON of step_line(), for reports that hold it as a part.

#include <nlohmann/json_fwd.hpp>

#include "tranche/engine/step_result.h"

namespace tranche::training {

/// JSON has no infinities and no NaN: null stands for them.
nlohmann::ordered_json json_number(double value);
/// The loss of an evaluation; null where it saw no tokens.
nlohmann::ordered_json loss_json(const EvaluationResult& result);
nlohmann::ordered_json step_json(const StepResult& result);

}  // namespace tranche::training
