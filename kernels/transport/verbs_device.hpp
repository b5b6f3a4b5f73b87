#pragma once

// Open RDMA device, and memory registered with it.

#include <fcntl.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "forks.hpp"
#include "mapping.hpp"
#include "verbs.hpp"

namespace ds_ext::verbs {

/// Throw VerbsError for an error number of libibverbs; `what` names the object and the operation.
[[noreturn]] inline void fail(const std::string& what, int code) {
    std::string text = what + " failed: " + std::strerror(code);
    if (code == ENOMEM || code == EAGAIN) {
        rlimit limit{};
        getrlimit(RLIMIT_MEMLOCK, &limit);
        text += " (locked memory of this process: ";
        text += limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur >> 10) + " KiB";
        text += "). Raise the limit with `ulimit -l unlimited`, or memlock in /etc/security/limits.conf";
    }
    throw VerbsError(text);
}

/// Port of a device, and the index of its GID.
struct PortChoice {
    std::string device;
    std::uint8_t port = 1;
    int gid_index = 0;
};

/// Open port with its event channel, shared by all links of a rank. A forked child shares the open files, so it must
/// not release them.
class OpenPort : public Owned {
  public:
    explicit OpenPort(const PortChoice& choice) : choice_(choice) {
        open(choice.device);
        const Library& lib = Library::get();
        if (lib.query_port(context_.get(), choice.port, &attributes_) != 0) fail(name() + ": query of the port", errno);
        if (attributes_.state != kPortActive)
            throw VerbsError(name() + ": not active. Check the cable and the state of the link");
        if (lib.query_gid(context_.get(), choice.port, choice.gid_index, &gid_) != 0)
            fail(name() + ": query of GID " + std::to_string(choice.gid_index), errno);
        domain_.reset(lib.alloc_pd(context_.get()));
        if (!domain_) fail(name() + ": protection domain", errno);
        channel_.reset(lib.create_comp_channel(context_.get()));
        if (!channel_) fail(name() + ": event channel", errno);
        for (const int number : {channel_->fd, context_->async_fd})
            if (fcntl(number, F_SETFL, fcntl(number, F_GETFL) | O_NONBLOCK) != 0) fail(name() + ": O_NONBLOCK", errno);
    }

    OpenPort(const OpenPort&) = delete;
    OpenPort& operator=(const OpenPort&) = delete;
    ~OpenPort() {
        if (ours()) return;
        static_cast<void>(channel_.release());
        static_cast<void>(domain_.release());
        static_cast<void>(context_.release());
    }

    std::string name() const { return choice_.device + " port " + std::to_string(choice_.port); }
    std::uint8_t port() const { return choice_.port; }
    int gid_index() const { return choice_.gid_index; }
    const Gid& gid() const { return gid_; }
    std::uint16_t lid() const { return attributes_.lid; }
    std::uint32_t mtu() const { return attributes_.active_mtu; }
    std::uint64_t max_request_bytes() const { return attributes_.max_msg_sz; }
    Context* context() const { return context_.get(); }
    Domain* domain() const { return domain_.get(); }
    Channel* channel() const { return channel_.get(); }
    int events() const { return channel_->fd; }
    int device_events() const { return context_->async_fd; }

    /// Acknowledge the completion events. Thread-safe.
    void take_events() const {
        const Library& lib = Library::get();
        CompletionQueue* queue = nullptr;
        void* context = nullptr;
        while (lib.get_cq_event(channel_.get(), &queue, &context) == 0) lib.ack_cq_events(queue, 1);
    }

    /// Acknowledge the asynchronous events of the device. Thread-safe.
    void take_device_events() const {
        const Library& lib = Library::get();
        AsyncEvent event{};
        while (lib.get_async_event(context_.get(), &event) == 0) lib.ack_async_event(&event);
    }

  private:
    void open(const std::string& device) {
        const Library& lib = Library::get();
        int count = 0;
        const std::unique_ptr<Device*, void (*)(Device**)> list(lib.get_device_list(&count), lib.free_device_list);
        if (!list) fail("list of RDMA devices", errno);
        for (int i = 0; i < count; ++i) {
            if (device != lib.get_device_name(list.get()[i])) continue;
            context_.reset(lib.open_device(list.get()[i]));
            if (!context_) fail(device + ": opening the RDMA device (see /dev/infiniband)", errno);
            return;
        }
        throw VerbsError(device + ": libibverbs does not list this RDMA device (got " + std::to_string(count) +
                         " devices). Install its provider (Debian, Ubuntu: apt install ibverbs-providers)");
    }

    template <auto Member>
    struct Release {
        template <typename Object>
        void operator()(Object* object) const {
            (Library::get().*Member)(object);
        }
    };

    PortChoice choice_;
    std::unique_ptr<Context, Release<&Library::close_device>> context_;
    std::unique_ptr<Domain, Release<&Library::dealloc_pd>> domain_;
    std::unique_ptr<Channel, Release<&Library::destroy_comp_channel>> channel_;
    PortAttributes attributes_{};
    Gid gid_{};
};

/// Registered memory. It is shared memory, so that a fork does not move its pages (copy on write) away from the device.
class Region : public Owned {
  public:
    Region(std::shared_ptr<OpenPort> port, std::size_t bytes, int access)
        : port_(std::move(port)), memory_(Mapping::create(bytes)) {
        memory_.commit(0, bytes);
        memory_.close_descriptor();
        region_ = Library::get().reg_mr(port_->domain(), memory_.address(), bytes, access);
        if (region_ == nullptr)
            fail(port_->name() + ": registration of " + std::to_string(bytes >> 10) + " KiB", errno);
    }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() {
        if (ours()) Library::get().dereg_mr(region_);
    }

    unsigned char* address() const { return memory_.address(); }
    std::uint64_t bytes() const { return memory_.bytes(); }
    std::uint32_t local_key() const { return region_->lkey; }
    std::uint32_t remote_key() const { return region_->rkey; }

  private:
    std::shared_ptr<OpenPort> port_;
    Mapping memory_;
    MemoryRegion* region_ = nullptr;
};

}  // namespace ds_ext::verbs
