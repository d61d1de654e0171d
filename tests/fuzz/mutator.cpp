#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace tranche::fuzz {

namespace {

constexpr std::size_t largest_input = 64 * 1024;
constexpr std::array<std::string_view, 22> numbers{"0",
                                                   "1",
                                                   "-1",
                                                   "2",
                                                   "7",
                                                   "64",
                                                   "255",
                                                   "256",
                                                   "4096",
                                                   "65535",
                                                   "65536",
                                                   "65537",
                                                   "2147483647",
                                                   "2147483648",
                                                   "4294967296",
                                                   "1152921504606846976",
                                                   "9223372036854775807",
                                                   "-9223372036854775808",
                                                   "18446744073709551615",
                                                   "1e999",
                                                   "-0.0",
                                                   "1e-400"};

bool is_number(char c) {
  return (c >= '0' && c <= '9') || c == '-' || c == '.';
}

}  // namespace

std::string Mutator::next() {
  std::string text = seeds_[below(seeds_.size())];
  do {
    change(text);
  } while (below(2) == 0);
  if (text.size() > largest_input) text.resize(largest_input);
  return text;
}

void Mutator::change(std::string& text) {
  const std::size_t at = below(text.size() + 1);
  switch (below(12)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << below(8)));
      break;
    case 1:
      if (at < text.size()) text[at] = static_cast<char>(below(256));
      break;
    case 2:
      text.insert(at, 1, static_cast<char>(below(256)));
      break;
    case 3:
      text.erase(at, 1 + below(below(2) == 0 ? 4 : text.size()));
      break;
    case 4: {  // repeats a block at another place
      const std::string block = text.substr(at, 1 + below(64));
      text.insert(below(text.size() + 1), block);
      break;
    }
    case 5: {  // continues with another seed
      const std::string& other = seeds_[below(seeds_.size())];
      text = text.substr(0, at) + other.substr(below(other.size() + 1));
      break;
    }
    case 6:
      text.insert(at, words_[below(words_.size())]);
      break;
    case 7: {  // replaces one quoted word by another
      const std::size_t begin = text.find('"', at), end = text.find('"', begin + 1);
      if (begin != std::string::npos && end != std::string::npos) {
        text.replace(begin, end + 1 - begin, words_[below(words_.size())]);
      }
      break;
    }
    case 8:  // deeper than any real file
      text.insert(at, std::string(1 + below(300), "[{\"("[below(4)]));
      break;
    default:
      replace_value(text);
  }
}

void Mutator::replace_value(std::string& text) {
  const std::size_t from = below(text.size() + 1);
  if (below(2) == 0) {
    const auto begin = std::find_if(text.begin() + static_cast<std::ptrdiff_t>(from), text.end(), is_number);
    const auto end = std::find_if_not(begin, text.end(), is_number);
    text.replace(begin, end, numbers[below(numbers.size())]);
    return;
  }
  const std::size_t colon = text.find(':', from);
  if (colon == std::string::npos) return;
  const std::size_t end = std::min(text.find_first_of(",}]\x1e", colon), text.size());
  text.replace(colon + 1, end - colon - 1, words_[below(words_.size())]);
}

}  // namespace tranche::fuzz
