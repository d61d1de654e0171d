#include "comm/transport/operation.h"

namespace tranche::comm {

std::string describe(std::string_view name, std::string_view unit, std::string_view phase) {
  std::string text(name);
  if (!unit.empty()) text.append(" of unit ").append(unit);
  if (!phase.empty()) text.append(" in ").append(phase);
  return text;
}

}  // namespace tranche::comm
