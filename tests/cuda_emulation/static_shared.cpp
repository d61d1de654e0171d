#include "tests/cuda_emulation/static_shared.h"

#include <elf.h>
#include <link.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

namespace cuda_emulation {
namespace {

struct Place {
  std::size_t offset = 0;  // offset in the program's thread-local storage
  std::size_t bytes = 0;
};

template <class T>
std::vector<T> read_table(std::ifstream& file, const ElfW(Shdr) & section) {
  std::vector<T> table(section.sh_size / sizeof(T));
  file.seekg(static_cast<std::streamoff>(section.sh_offset));
  file.read(reinterpret_cast<char*>(table.data()), static_cast<std::streamsize>(table.size() * sizeof(T)));
  return table;
}

std::vector<Place> find_places() {
  std::ifstream file("/proc/self/exe", std::ios::binary);
  ElfW(Ehdr) header;
  if (!file.read(reinterpret_cast<char*>(&header), sizeof header)) return {};
  ElfW(Shdr) all{};
  all.sh_offset = header.e_shoff;
  all.sh_size = static_cast<std::size_t>(header.e_shnum) * sizeof(ElfW(Shdr));
  const auto sections = read_table<ElfW(Shdr)>(file, all);
  std::vector<Place> places;
  for (const ElfW(Shdr) & section : sections) {
    if (section.sh_type != SHT_SYMTAB || section.sh_link >= sections.size()) continue;
    const auto names = read_table<char>(file, sections[section.sh_link]);
    for (const ElfW(Sym) & symbol : read_table<ElfW(Sym)>(file, section)) {
      if (!file || (symbol.st_info & 0xf) != STT_TLS || symbol.st_name >= names.size()) continue;
      if (std::strstr(names.data() + symbol.st_name, "B11cuda_shared") == nullptr) continue;
      places.push_back({symbol.st_value, symbol.st_size});
    }
  }
  return places;
}

// The first object is the program itself.
int take_first(dl_phdr_info* info, std::size_t, void* base) {
  *static_cast<void**>(base) = info->dlpi_tls_data;
  return 1;
}

}  // namespace

std::vector<SharedVariable> shared_variables_of_this_thread() {
  static const std::vector<Place> places = find_places();
  void* base = nullptr;
  dl_iterate_phdr(&take_first, &base);
  std::vector<SharedVariable> variables;
  if (base == nullptr) return variables;
  for (const Place& place : places)
    variables.push_back({static_cast<unsigned char*>(base) + place.offset, place.bytes});
  return variables;
}

}  // namespace cuda_emulation
