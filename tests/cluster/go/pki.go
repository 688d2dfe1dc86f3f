package main

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"flag"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// pki writes the certificates of a cluster into a directory: NAME.crt and NAME.key for each name below, and the
// service-account key pair sa.key, sa.pub.
func pki() int {
	dir := flag.String("dir", "", "where the files go")
	nodeName := flag.String("node-name", "", "name of the node")
	nodeIP := flag.String("node-ip", "", "address of API server and kubelet")
	serviceIP := flag.String("service-ip", "", "address of the Service kubernetes.default")
	_ = flag.CommandLine.Parse(os.Args[1:])

	m := maker{dir: *dir}
	ca := m.authority("ca", "rig")
	front := m.authority("front-ca", "rig-front-proxy")
	loopback, node, service := net.IPv4(127, 0, 0, 1), net.ParseIP(*nodeIP), net.ParseIP(*serviceIP)
	m.leaf(ca, "apiserver", pkix.Name{CommonName: "kube-apiserver"}, []string{
		"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost",
	}, loopback, node, service)
	m.leaf(ca, "kubelet-serving", pkix.Name{CommonName: *nodeName}, []string{*nodeName}, node)
	m.leaf(front, "front-client", pkix.Name{CommonName: "front-proxy-client"}, nil)
	for name, subject := range map[string]pkix.Name{
		"admin":                   {CommonName: "admin", Organization: []string{"system:masters"}},
		"kubelet-client":          {CommonName: "kube-apiserver", Organization: []string{"system:masters"}},
		"kube-controller-manager": {CommonName: "system:kube-controller-manager"},
		"kube-scheduler":          {CommonName: "system:kube-scheduler"},
		"kube-proxy":              {CommonName: "system:kube-proxy"},
		"kubelet":                 {CommonName: "system:node:" + *nodeName, Organization: []string{"system:nodes"}},
	} {
		m.leaf(ca, name, subject, nil)
	}
	m.serviceAccountKey()
	if m.err != nil {
		return fail(m.err)
	}
	return 0
}

// maker remembers the first error, so that the list above reads as a list.
type maker struct {
	dir    string
	serial int64
	err    error
}

type authority struct {
	certificate *x509.Certificate
	key         crypto.Signer
}

func (m *maker) authority(name, commonName string) authority {
	return m.issue(nil, name, &x509.Certificate{
		Subject: pkix.Name{CommonName: commonName}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	})
}

func (m *maker) leaf(by authority, name string, subject pkix.Name, hosts []string, addresses ...net.IP) {
	m.issue(&by, name, &x509.Certificate{
		Subject: subject, DNSNames: hosts, IPAddresses: addresses, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	})
}

func (m *maker) issue(by *authority, name string, template *x509.Certificate) authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	m.note(err)
	if by == nil {
		by = &authority{template, key}
	}
	m.serial++
	template.SerialNumber = big.NewInt(m.serial)
	template.NotBefore = time.Now().Add(-time.Hour)
	template.NotAfter = time.Now().AddDate(1, 0, 0)
	der, err := x509.CreateCertificate(rand.Reader, template, by.certificate, key.Public(), by.key)
	m.note(err)
	certificate, err := x509.ParseCertificate(der)
	m.note(err)
	m.write(name+".crt", "CERTIFICATE", der)
	m.writeKey(name+".key", key)
	return authority{certificate, key}
}

func (m *maker) serviceAccountKey() {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	m.note(err)
	m.writeKey("sa.key", key)
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	m.note(err)
	m.write("sa.pub", "PUBLIC KEY", public)
}

func (m *maker) writeKey(file string, key any) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	m.note(err)
	m.write(file, "PRIVATE KEY", der)
}

func (m *maker) write(file, kind string, der []byte) {
	m.note(os.WriteFile(filepath.Join(m.dir, file), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
}

func (m *maker) note(err error) {
	if m.err == nil {
		m.err = err
	}
}
