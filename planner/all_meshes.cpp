#include "tranche/planner/all_meshes.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <tuple>

#include "tranche/partition/mesh.h"

namespace tranche::planner {

namespace {

constexpr std::array searched{MeshAxis::replicate, MeshAxis::pipeline, MeshAxis::shard, MeshAxis::context,
                              MeshAxis::tensor};

std::string_view trimmed_word(std::string_view text) {
  const auto first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

/// The parts between commas, with spaces around them removed.
std::vector<std::string> parts_of(std::string_view text) {
  std::vector<std::string> parts;
  for (std::size_t begin = 0, comma = 0; comma != std::string_view::npos; begin = comma + 1) {
    comma = text.find(',', begin);
    parts.emplace_back(
        trimmed_word(text.substr(begin, comma == std::string_view::npos ? comma : comma - begin)));
  }
  return parts;
}

}  // namespace

std::optional<std::string> searched_axes(std::string_view mesh) {
  std::vector<std::string> parts = parts_of(mesh);
  if (parts.front() != "search") return std::nullopt;
  std::string axes;
  for (std::size_t i = 1; i < parts.size(); ++i) axes += (i > 1 ? ", " : "") + parts[i];
  return axes;
}

std::vector<std::string> all_meshes(int ranks, const std::string& axes) {
  std::array<bool, mesh_axes> given{};
  std::string sizes;  // sizes that are given, without the searched axes
  if (!trimmed_word(axes).empty()) {
    for (const std::string& part : parts_of(axes)) {
      const std::size_t equals = part.find('=');
      const bool open = equals != std::string::npos && trimmed_word(part.substr(equals + 1)) == "*";
      if (!open) sizes += (sizes.empty() ? "" : ", ") + part;
      for (int axis = 0; axis < mesh_axes && !open; ++axis) {
        if (trimmed_word(part.substr(0, equals)) == name_of(static_cast<MeshAxis>(axis))) {
          given[static_cast<std::size_t>(axis)] = true;
        }
      }
    }
  }
  const auto free = std::find_if(searched.begin(), searched.end(),
                                 [&](MeshAxis axis) { return !given[static_cast<std::size_t>(axis)]; });
  std::string whole = sizes;
  if (free != searched.end()) whole += (sizes.empty() ? "" : ", ") + std::string(name_of(*free)) + "=*";
  const Mesh fixed = Mesh::parse(whole, ranks);
  std::array<int, mesh_axes> size{};
  int rest = ranks;
  for (int axis = 0; axis < mesh_axes; ++axis) {
    const auto index = static_cast<std::size_t>(axis);
    size[index] = given[index] ? fixed.size(static_cast<MeshAxis>(axis)) : 1;
    rest /= size[index];
  }
  std::vector<std::array<int, mesh_axes>> found;
  const std::function<void(std::size_t, int)> choose = [&](std::size_t next, int left) {
    if (next == searched.size()) {
      if (left == 1) found.push_back(size);
      return;
    }
    const auto axis = static_cast<std::size_t>(searched[next]);
    if (given[axis]) return choose(next + 1, left);
    for (int one = 1; one <= left; ++one) {
      if (left % one != 0) continue;
      size[axis] = one;
      choose(next + 1, left / one);
    }
    size[axis] = 1;
  };
  choose(0, rest);
  const auto at = [](const std::array<int, mesh_axes>& one, MeshAxis axis) {
    return one[static_cast<std::size_t>(axis)];
  };
  std::stable_sort(found.begin(), found.end(), [&](const auto& a, const auto& b) {
    const auto key = [&](const auto& one) {
      return std::tuple(at(one, MeshAxis::pipeline) * at(one, MeshAxis::context) * at(one, MeshAxis::tensor),
                        at(one, MeshAxis::tensor), at(one, MeshAxis::context), at(one, MeshAxis::replicate));
    };
    return key(a) < key(b);
  });
  std::vector<std::string> meshes;
  for (const auto& one : found) {
    std::string text;
    for (int axis = 0; axis < mesh_axes; ++axis) {
      const int ranks_of_axis = one[static_cast<std::size_t>(axis)];
      if (ranks_of_axis == 1) continue;
      text += (text.empty() ? "" : ", ") + std::string(name_of(static_cast<MeshAxis>(axis))) + "=" +
              std::to_string(ranks_of_axis);
    }
    meshes.push_back(text.empty() ? "shard=1" : text);
  }
  return meshes;
}

}  // namespace tranche::planner
