// A simulated accelerator: torch's PrivateUse1 with asynchronous streams, and memory that the host cannot read.
//
// The other files are headers, since torch's own ones take most of the time to compile.
#include "transport.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace simulated {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return is_started; }
    DeviceIndex deviceCount() const override { return kDevices; }
    DeviceIndex getCurrentDevice() const override { return current_device; }
    void setCurrentDevice(DeviceIndex index) const override { Guard::exchange(index); }
    DeviceIndex exchangeDevice(DeviceIndex index) const override { return Guard::exchange(index); }
    DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return Guard::exchange(index); }
    bool isPinnedPtr(const void* start) const override { return only<PinnedAllocator>().contains(start); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &only<PinnedAllocator>(); }
    const at::Generator& getDefaultGenerator(DeviceIndex) const override { return generator; }
    at::Generator getNewGenerator(DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        resize_storage(storage, bytes);
    }
};

}  // namespace simulated

PYBIND11_MODULE(simulated_accelerator, module) {
    using namespace simulated;
    c10::SetAllocator(kType, &only<DeviceAllocator>());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    module.attr("devices") = kDevices;
    module.def("is_initialized", [] { return is_started.load(); });
    module.def("end", [] { is_ending = true; });
    module.attr("generator") = generator;
    module.def("set_delays", [](int main, int side, int collective, int seed) {
        longest_delays[kMain] = main;
        longest_delays[kSide] = side;
        longest_delays[kCollective] = collective;
        seed_of_delays = seed;
    });
    module.def("sleep_ms", [](int milliseconds) {
        current_queue(current_device).push([=] {
            std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        });
    });
    module.def("transport", [](int rank, int size, const BackendPtr& gloo) {
        return BackendPtr(c10::make_intrusive<Transport>(rank, size, gloo));
    });
}
