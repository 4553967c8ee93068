// Informers runs what DRA drivers in Go use to keep their ResourceSlices, once for each of many Nodes:
// the slice controller of k8s.io/dynamic-resource-allocation, and an informer of the own Node.
package main

import (
	"context"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
)

const (
	driver = "informers.example.com"
	// As many start as agents do: "first start" in run.py.
	perSecond = 80
)

func main() {
	server := flag.String("server", "", "URL of the API server")
	ca := flag.String("ca", "", "file with its certificate authority")
	token := flag.String("token", "", "who asks")
	nodes := flag.Int("nodes", 0, "how many")
	devices := flag.Int("devices", 8, "of each node")
	klog.InitFlags(nil)
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	for at := range *nodes {
		config := &rest.Config{
			Host:            *server,
			BearerToken:     *token,
			TLSClientConfig: rest.TLSClientConfig{CAFile: *ca},
			// client-go shares connections among configs with the same Dial.
			Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, network, address)
			},
		}
		// It waits until it has read its slices: one after the other would be a node a second.
		go func() {
			if err := follow(ctx, config, fmt.Sprintf("fleet-%05d", at), *devices); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}()
		time.Sleep(time.Second / perSecond)
	}
	fmt.Println("started")
	<-ctx.Done()
}

func follow(ctx context.Context, config *rest.Config, node string, devices int) error {
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	only := func(options *metav1.ListOptions) { options.FieldSelector = "metadata.name=" + node }
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTweakListOptions(only))
	if _, err := factory.Core().V1().Nodes().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{}); err != nil {
		return err
	}
	factory.Start(ctx.Done())

	slice := resourceslice.Slice{}
	for at := range devices {
		slice.Devices = append(slice.Devices, resourceapi.Device{Name: fmt.Sprintf("npu-%d", at)})
	}
	_, err = resourceslice.StartController(ctx, resourceslice.Options{
		DriverName: driver,
		KubeClient: client,
		Owner:      &resourceslice.Owner{APIVersion: "v1", Kind: "Node", Name: node},
		Resources: &resourceslice.DriverResources{
			Pools: map[string]resourceslice.Pool{node: {Slices: []resourceslice.Slice{slice}}},
		},
		ErrorHandler: func(context.Context, error, string) {}, // it tries again
	})
	return err
}
