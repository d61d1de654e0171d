#include "core/folded_name.h"

#include <cctype>

namespace tranche::detail {

std::string with_folded_numbers(std::string_view name) {
  std::string text;
  for (std::size_t i = 0; i < name.size(); ++i) {
    const bool digit = std::isdigit(static_cast<unsigned char>(name[i])) != 0;
    const bool starts = i == 0 || std::isalnum(static_cast<unsigned char>(name[i - 1])) == 0;
    if (!digit || (!starts && text.back() != '*')) {
      text += name[i];
    } else if (starts) {
      text += '*';
    }
  }
  return text;
}

}  // namespace tranche::detail
